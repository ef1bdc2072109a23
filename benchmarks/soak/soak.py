"""The soak: load, faults and churn for a time, then a verdict."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.faults.cell import CellRunner
from benchmarks.faults.cluster import KINDS, MODELLED, LiveGraph, Member, live_graph
from benchmarks.faults.fault import Fault, Scene
from benchmarks.faults.faults import FAULTS
from benchmarks.faults.invariants import check_endings, check_owners
from benchmarks.faults.load import Client
from benchmarks.faults.moments import Moment, Stage
from benchmarks.faults.strike import strike
from benchmarks.faults.tokens import expected_tokens
from benchmarks.soak.churn import Change, change
from benchmarks.soak.replay import ReplayedLoad
from benchmarks.soak.sampling import REDIS, Sampler
from benchmarks.soak.trend import Trend, trends

BOUND_S = 30.0
"""A round that has no end after this time is lost."""
AGENTS = 4
CHURN_SHARE = 0.3
"""Of the events; the rest are faults."""
LONGEST_PAUSE_S = 3.0
"""Between two events."""
INTERVAL_S = 5.0
SMALL_STORES = ("--kv-store-tokens", "32768", "--kv-capacity-tokens", "16384")
"""Stores that are full after a minute or two, so that the second half has no cache that still fills."""

_ENDS_ANY_WORKER = ("deadly-request", "rolling-restart", "rolling-weights")
SOAKED = {name: fault for name, fault in FAULTS.items() if name not in _ENDS_ANY_WORKER}
"""Faults that leave the first process of each kind alive. Churn replaces workers as a rolling restart does."""


@dataclass
class SoakResult:
    """What came of a soak.

    Attributes:
        events: by name; those that missed their moment are counted in `missed` as well.
        rounds: by ending. errors: the beginnings of the texts of rounds that failed clearly, with their number.
        violations: of the invariants, with what was left behind at the end.
        trends: of the processes that lived through the second half.
    """

    minutes: float
    seed: int
    events: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    rounds: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    trends: list[Trend] = field(default_factory=list)

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
    faults: Mapping[str, Fault] = MappingProxyType(SOAKED),
    interval_s: float = INTERVAL_S,
) -> SoakResult:
    """Run it in `folder`, where the logs of all processes go."""
    async with live_graph(folder, MODELLED.with_worker_flags(SMALL_STORES)) as graph:
        runner = CellRunner(graph)
        await runner.start()
        run = _Run(graph, SoakResult(minutes, seed), list(faults.values()))
        async with Sampler(graph, interval_s, samples) as sampler:
            await run.until_over()
        result = run.result
        result.violations += await runner.violations_of_rest()
        elders = [*(member.name for member in run.elders), REDIS]
        found = trends(sampler.series, sampler.start_s, sampler.end_s)
        result.trends = [each for name in elders for each in found if each.process == name]
        return result


class _Run:
    """Load and events of one soak.

    Attributes:
        elders: the first process of each kind. It is never ended, because growth shows only in a process that lives.
    """

    def __init__(self, graph: LiveGraph, result: SoakResult, faults: list[Fault]) -> None:
        self.result = result
        self.elders: list[Member] = [graph.of(kind)[0] for kind in KINDS]
        self._graph = graph
        self._faults = faults
        self._rng = random.Random(result.seed)
        self._expected = expected_tokens(graph.model)
        self._number = 0
        urls: Callable[[], list[str]] = lambda: [each.url for each in graph.of("frontend") if each.is_ready]  # noqa: E731
        self._client = Client(urls, self._expected, BOUND_S)

    async def until_over(self) -> None:
        end_s = time.monotonic() + 60.0 * self.result.minutes
        load = ReplayedLoad(self._client, self._expected, AGENTS, self.result.seed)
        try:
            while time.monotonic() < end_s:
                await self._event()
                await asyncio.sleep(self._rng.uniform(0.0, LONGEST_PAUSE_S))
            await load.stop()
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
            fault, moment = self._rng.choice(self._faults), self._rng.choice(list(Moment))
            name, kind, event = f"{fault.name} x {moment.label}", fault.name, self._strike(fault, moment)
        print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
        self.result.events[kind] += 1
        try:
            await event
        except Exception as error:
            self._violated(name, f"the graph did not come back: {error!r}")
        for number, member in enumerate(self.elders):
            if not member.is_running:
                self._violated(name, f"{member.name} ended: {member.log.read_text()[-1000:]}")
                await self._graph.replace_ended()
                self.elders[number] = self._graph.of(member.kind)[0]

    def _violated(self, event: str, text: str) -> None:
        print(f"    VIOLATION: {text}", file=sys.stderr, flush=True)
        self.result.violations.append(f"{event}: {text}")

    async def _strike(self, fault: Fault, moment: Moment) -> None:
        graph = self._graph
        self._number += 1
        for member in graph.members:
            member.forget_log()
        stage = Stage(graph, self._client, self._expected, f"event-{self._number}")
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
        result.errors.update(each.detail[:100] for each in results if each.ending == "failed")
        result.violations += check_endings(results)
        result.violations += check_owners(results, {})
