"""The soak: load, faults and churn for a time, then a verdict."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ampd.keys import PAGE_TOKENS
from ampd.state.store import StateUnavailableError
from benchmarks.commit import commit
from benchmarks.faults.cell import CellRunner
from benchmarks.faults.cluster import KINDS, LiveGraph, Member, live_graph
from benchmarks.faults.fault import Fault, Scene
from benchmarks.faults.faults import FAULTS
from benchmarks.faults.invariants import check_endings, check_owners
from benchmarks.faults.learnt import tenant_options
from benchmarks.faults.load import Agent, Client
from benchmarks.faults.moments import Moment, Stage
from benchmarks.faults.strike import strike
from benchmarks.soak.churn import Change, change
from benchmarks.soak.failures import Failures, failures_of, read_refusals
from benchmarks.soak.replay import ReplayedLoad
from benchmarks.soak.sampling import REDIS, SETTLED_S, Sampler
from benchmarks.soak.soaked import Soaked, modelled
from benchmarks.soak.trend import WINDOWS, Trend, trends
from tests.waiting import until

CHURN_SHARE = 0.3
"""Of the events; the rest are faults."""
LONGEST_PAUSE_S = 3.0
"""Between two events."""
INTERVAL_S = 5.0
REST_AFTER_WINDOWS = 0.5
"""The load rests after this share of a window of the trends, so that each window has a sample without sessions."""
RELEASED_WITHIN_S = 10.0
SETTLED_WITHIN_S = 3 * SETTLED_S


@dataclass
class SoakResult:
    """What came of a soak.

    Attributes:
        events: by name; those that missed their moment are counted in `missed` as well.
        rounds: by ending. failures: those that failed clearly, by cause.
        ended_late: sessions that were still open when the load rested, because the event that they belonged to had
            failed, or because their last round was not served within `Soaked.bound_s`, although it was sent again and
            again. The harness has then ended them. Each one is a violation, too.
        violations: of the invariants, with what was left behind at the end.
        trends: of the processes that lived through the second half.
        commit: of the code.
    """

    minutes: float
    seed: int
    events: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    rounds: Counter[str] = field(default_factory=Counter)
    failures: Failures = field(default_factory=dict)
    ended_late: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    trends: list[Trend] = field(default_factory=list)
    commit: str = field(default_factory=commit)

    @property
    def growing(self) -> list[Trend]:
        return [each for each in self.trends if each.is_growing]

    def as_dict(self) -> dict[str, Any]:
        verdict = "growing" if self.growing else "flat"
        listed = [asdict(each) | {"is_growing": each.is_growing} for each in self.trends]
        return {**vars(self), "trends": listed, "verdict": verdict}


async def soak(
    folder: Path,
    minutes: float,
    seed: int = 0,
    *,
    samples: Path | None = None,
    soaked: Soaked | None = None,
    interval_s: float = INTERVAL_S,
) -> SoakResult:
    """Run it in `folder`, where the logs of all processes go.

    Args:
        soaked: default: modelled engines.
    """
    soaked = soaked or modelled()
    async with live_graph(folder, soaked.setting.kind) as graph:
        runner = soaked.setting.runner(graph)
        await runner.start()
        run = _Run(graph, SoakResult(minutes, seed), soaked, runner)
        await run.send_poison()
        async with Sampler(graph, interval_s, samples) as sampler:
            await run.until_over(sampler)
        result = run.result
        result.violations += await runner.violations_of_rest()
        elders = [*(member.name for member in run.elders), REDIS]
        found = trends(sampler.series, sampler.start_s, sampler.end_s)
        result.trends = [each for name in elders for each in found if each.process == name]
        return result


def shuffled_again(faults: Sequence[Fault], rng: random.Random) -> Iterator[Fault]:
    """All faults in a random order, and then all of them in another one: independent choices leave some out."""
    while True:
        yield from rng.sample(faults, len(faults))


class _Run:
    """Load and events of one soak.

    Attributes:
        elders: the first process of each kind. It is never ended, because growth shows only in a process that lives.
    """

    def __init__(self, graph: LiveGraph, result: SoakResult, soaked: Soaked, runner: CellRunner) -> None:
        self.result = result
        self._soaked = soaked
        self._runner = runner
        self.elders: list[Member] = [graph.of(kind)[0] for kind in KINDS]
        self._graph = graph
        self._rng = random.Random(result.seed)
        self._faults = shuffled_again(list(soaked.setting.faults.values()), self._rng)
        self._expected = runner.expected
        self._number = 0
        self._begun: list[tuple[float, str]] = []
        urls: Callable[[], list[str]] = lambda: [each.url for each in graph.of("frontend") if each.is_ready]  # noqa: E731
        self._client = Client(urls, self._expected, soaked.bound_s)

    async def send_poison(self) -> None:
        """Such requests make processes allocate once, which must not look like growth. One sending may miss some."""
        for _ in range(2):
            await self._strike(FAULTS["poison"], Moment.TOOL_GAP)

    async def until_over(self, sampler: Sampler) -> None:
        duration_s = 60.0 * self.result.minutes
        rested_s = time.monotonic()
        end_s = rested_s + duration_s
        load = ReplayedLoad(self._client, self._expected, self._soaked.agents, self.result.seed)
        try:
            while time.monotonic() < end_s:
                await self._event()
                if time.monotonic() >= rested_s + REST_AFTER_WINDOWS * duration_s / 2 / WINDOWS:
                    await load.rest()
                    await self._end_open_sessions()
                    await self._until_released()
                    await self._until_settled(sampler)
                    await sampler.take()
                    load.go_on()
                    rested_s = time.monotonic()
                await asyncio.sleep(self._rng.uniform(0.0, LONGEST_PAUSE_S))
            await load.stop()
            await self._end_open_sessions()
        except BaseException:
            await load.cancel()
            raise
        finally:
            await self._client.close()
        self._judge()

    async def _event(self) -> None:
        if self._rng.random() < CHURN_SHARE:
            what = self._rng.choice(list(Change))
            name, kind, event = str(what), what.value, change(self._graph, what, self.elders, self._rng)
        else:
            fault = next(self._faults)
            moments = [moment for moment in self._soaked.setting.moments if moment not in fault.never_at]
            moment = self._rng.choice(moments)
            name, kind, event = f"{fault.name} x {moment.label}", fault.name, self._strike(fault, moment)
        print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
        self.result.events[kind] += 1
        self._begun.append((time.monotonic(), name))
        try:
            await event
        except Exception as error:
            self._violated(name, f"the graph did not come back: {error!r}")
            with suppress(RuntimeError, TimeoutError, StateUnavailableError):
                await self._restore()
        for number, member in enumerate(self.elders):
            if not member.is_running:
                self._violated(name, f"{member.name} ended: {member.log.read_text()[-1000:]}")
                await self._graph.replace_ended()
                self.elders[number] = self._graph.of(member.kind)[0]

    async def _end_open_sessions(self) -> None:
        """End what a failed event left open, so that only the product's own leaks are left."""
        for session_id in self._client.open_sessions():
            self.result.ended_late.append(session_id)
            self._violated(session_id, f"its last round was not served within {self._soaked.bound_s:g} s")
            agent = Agent(self._client, self._expected, session_id, random.Random(session_id))
            await agent.round(PAGE_TOKENS, 1, is_final=True, options=tenant_options(session_id))

    async def _until_released(self) -> None:
        """Wait until the workers have dropped the sessions that have ended. KV that they keep after that is a leak."""

        async def is_released() -> bool:
            try:
                figures = await self._graph.figures()
            except (OSError, ValueError):
                return False
            return not any(view.get("session tokens") for view in figures.values())

        with suppress(TimeoutError):
            await until(is_released, RELEASED_WITHIN_S, poll_s=0.2)

    async def _until_settled(self, sampler: Sampler) -> None:
        """As many workers as at the start, so that there are samples in which connections can be judged."""
        await self._graph.end_surplus(self.elders)
        with suppress(TimeoutError):
            await until(sampler.is_settled, SETTLED_WITHIN_S, poll_s=0.2)

    async def _restore(self) -> None:
        """After a failed event: end the workers that it has added, and start those that are missing."""
        graph = self._graph
        for member in graph.workers:
            if member.model != graph.worker_model:
                await graph.end(member, signal.SIGTERM)
        await graph.replace_ended()
        await graph.until_whole()

    def _violated(self, event: str, text: str) -> None:
        print(f"    VIOLATION: {text}", file=sys.stderr, flush=True)
        self.result.violations.append(f"{event}: {text}")

    async def _strike(self, fault: Fault, moment: Moment) -> None:
        graph = self._graph
        self._number += 1
        for member in graph.members:
            member.forget_log()
        name = f"event-{self._number}"
        await self._runner.prepare(self._client, name)
        stage = Stage(graph, self._client, self._expected, name)
        scene = Scene(graph, self._client, stage, moment, spared=self.elders)
        try:
            await fault.prepare(scene)
            struck = await strike(fault, scene)
            self.result.missed += struck.missed is not None
            await graph.until_whole()
            await stage.finish()
            await fault.check(scene)
        except BaseException:
            await stage.cancel()
            raise
        for text in scene.complaints:
            self._violated(f"{fault.name} x {moment.label}", text)

    def _judge(self) -> None:
        results, result = self._client.results, self.result
        result.rounds.update(str(each.ending) for each in results)
        result.rounds["accepted"] = len(results)
        refusals = read_refusals(self._graph.folder.glob("coordinator-*.log"))
        result.failures = failures_of(results, refusals, self._begun)
        result.violations += check_endings(results)
        result.violations += check_owners(results, {})
