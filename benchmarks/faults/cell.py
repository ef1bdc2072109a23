"""One cell of the matrix: a fault at a moment, under load, and what came of it."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from redis.asyncio import Redis

from benchmarks.commit import UNKNOWN
from benchmarks.faults.cluster import LiveGraph
from benchmarks.faults.fault import Fault, Scene
from benchmarks.faults.invariants import check_endings, check_idle, check_owners
from benchmarks.faults.load import BackgroundLoad, Client, Ending, RoundResult
from benchmarks.faults.moments import MissedMomentError, Moment, Stage
from benchmarks.faults.strike import strike
from benchmarks.faults.tokens import Expected, expected_tokens
from tests.waiting import until

BOUND_S = 20.0
"""A round that has no end after this time is lost."""

STALL_S = 1.0
"""A round that waits longer than this for a token was disturbed. The longest undisturbed wait is for a prefill."""

VICTIM_STALL_S = 0.1
"""The same for the victim's round: five decode steps."""

IDLE_WITHIN_S = 10.0
LAG_INTERVAL_S = 0.02
AGENTS = 3
TRIES = 4


@dataclass
class CellResult:
    """The outcome of one run.

    Attributes:
        lag_s: how late the harness' own event loop was at most. Other times cannot be more exact than this.
        recover_s: from the fault until each disturbed session had its next token: those with a round that failed, or
            that waited for longer than `STALL_S` (the victim's: `VICTIM_STALL_S`). Of a fault that lasts, the
            longest of these waits.
        ttfts_s: of all rounds that were in progress at the fault or began later, up to the end of the fault.
        errors: the different texts of rounds that failed clearly, with their number.
        violations: of the invariants.
        commit: of the code.
    """

    fault: str
    moment: str
    accepted: int = 0
    completed: int = 0
    failed: int = 0
    lost: int = 0
    wrong: int = 0
    left: int = 0
    recover_s: float = 0.0
    lag_s: float = 0.0
    ttfts_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    tries: int = 1
    commit: str = UNKNOWN

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class LoopLag:
    """Measures how late the event loop wakes a task that sleeps.

    Attributes:
        longest_s: the longest delay so far.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            due_s = time.monotonic() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.longest_s = max(self.longest_s, time.monotonic() - due_s)

    def stop(self) -> float:
        """End, and return `longest_s`."""
        self._task.cancel()
        return self.longest_s


class CellRunner:
    """Runs cells on one graph. `start` must run before the first one.

    Args:
        expected: the right answers; default: those of the modelled engine.
        agents: sessions beside the victim's.
        victim_stall_s: see `VICTIM_STALL_S`.

    Attributes:
        expected: the right answers.
    """

    def __init__(
        self,
        graph: LiveGraph,
        expected: Expected | None = None,
        agents: int = AGENTS,
        victim_stall_s: float = VICTIM_STALL_S,
    ) -> None:
        self._graph = graph
        self.expected = expected or expected_tokens(graph.model)
        self._agents = agents
        self._victim_stall_s = victim_stall_s
        self._tasks_at_start: dict[str, Mapping[str, int]] = {}
        self._number = 0

    async def start(self) -> None:
        """Serve some sessions, then note which asyncio tasks an idle process has."""
        client = self._client()
        await self.prepare(client, "warm-up")
        client.results.clear()
        load = BackgroundLoad(client, self.expected, "warm-up", self._agents, Stage.rng("warm-up"))
        try:
            await asyncio.sleep(1.0)
            await load.stop()
        except BaseException:
            await load.cancel()
            raise
        finally:
            await client.close()
        if violations := check_endings(client.results):
            raise RuntimeError(f"the graph does not serve: {violations}")
        await until(self._is_calm, timeout_s=30, poll_s=0.1)
        for name, view in (await self._graph.figures()).items():
            kind = name.rpartition("-")[0]
            most = Counter(self._tasks_at_start.get(kind, {})) | Counter(view["tasks"])
            self._tasks_at_start[kind] = most

    async def prepare(self, client: Client, name: str) -> None:
        """Before the sessions of a run, whose names begin with `name`."""

    async def run(self, fault: Fault, moment: Moment) -> CellResult:
        """Run a cell until the fault has struck at the moment."""
        for tries in range(1, TRIES + 1):
            try:
                result = await self._run(fault, moment)
            except MissedMomentError as error:
                print(f"    again: {error}", file=sys.stderr, flush=True)
                if tries == TRIES:
                    raise
                continue
            result.tries = tries
            return result
        raise AssertionError

    async def _run(self, fault: Fault, moment: Moment) -> CellResult:
        client = self._client()
        try:
            return await self._run_with(client, fault, moment)
        finally:
            await client.close()

    async def _run_with(self, client: Client, fault: Fault, moment: Moment) -> CellResult:
        graph = self._graph
        self._number += 1
        name = f"c{self._number}"
        for member in graph.members:
            member.forget_log()
        await self.prepare(client, name)
        client.results.clear()
        stage = Stage(graph, client, self.expected, name)
        scene = Scene(graph, client, stage, moment)
        await fault.prepare(scene)
        lag = LoopLag()
        load = BackgroundLoad(client, self.expected, name, self._agents, Stage.rng(name))
        try:
            struck = await strike(fault, scene)
            await graph.until_whole()
            bindings = await stage.finish()
            await load.stop()
            await fault.check(scene)
            if struck.missed is not None:
                await self.violations_of_rest()
                raise struck.missed
            result = self._judge(fault, moment, client.results, struck.struck_s, struck.healed_s)
            result.lag_s = lag.stop()
            result.violations += [
                f"{session_id}: its last round was never served" for session_id in client.open_sessions()
            ]
            result.violations += scene.complaints
            result.violations += check_owners(client.results, bindings)
            result.violations += await self.violations_of_rest()
            return result
        except BaseException:
            for requests in (stage, load):
                await requests.cancel()
            raise
        finally:
            lag.stop()

    def _judge(
        self, fault: Fault, moment: Moment, results: Sequence[RoundResult], struck_s: float, healed_s: float
    ) -> CellResult:
        endings = Counter(result.ending for result in results)
        after = [result for result in results if result.ended_s > struck_s and result.started_s < healed_s]
        failures = [result for result in results if result.ending is Ending.FAILED]
        waits = disturbances(results, f"c{self._number}-victim", struck_s, healed_s, self._victim_stall_s)
        return CellResult(
            fault=fault.name,
            moment=moment.value,
            accepted=len(results),
            completed=endings[Ending.COMPLETED],
            failed=endings[Ending.FAILED],
            lost=endings[Ending.LOST],
            wrong=endings[Ending.WRONG],
            left=endings[Ending.LEFT],
            recover_s=recover_s(waits, struck_s, lasts=fault.lasts),
            ttfts_s=[result.ttft_s for result in after if result.ttft_s is not None],
            errors=dict(Counter(result.detail[:300] for result in failures)),
            violations=check_endings(results),
        )

    async def violations_of_rest(self) -> list[str]:
        """What is left when all sessions have ended and there was time to clean up."""
        violations: list[str] = []

        async def is_clean() -> bool:
            violations[:] = check_idle(await self._graph.figures(), self._tasks_at_start, await self._keys())
            return not violations

        give_up_s, is_late = time.monotonic() + IDLE_WITHIN_S, False
        # Without `until`, because a Redis client whose end is cancelled leaves its connection open.
        while not await is_clean():
            if is_late:
                await self._delete_keys()  # the next cell must not report them again
                break
            await asyncio.sleep(0.1)
            is_late = time.monotonic() > give_up_s  # on a slow machine, one more answer that began after the time
        return violations

    async def _is_calm(self) -> bool:
        views = (await self._graph.figures()).values()
        return not any(view["rounds"] or view.get("page leases") or view.get("background work") for view in views)

    async def _keys(self) -> list[str]:
        """Keys of sessions, and of the lists of live sessions, in the shared state."""
        async with Redis.from_url(self._graph.redis.tcp_url) as client:
            prefix = f"ampd:{{{self._graph.namespace}}}:"
            kinds = (f"{prefix}session:*", f"{prefix}live*")
            return [key.decode() for kind in kinds async for key in client.scan_iter(kind, count=1000)]

    async def _delete_keys(self) -> None:
        async with Redis.from_url(self._graph.redis.tcp_url) as client:
            for key in await self._keys():
                await client.delete(key)

    def _client(self) -> Client:
        return Client(
            lambda: [member.url for member in self._graph.of("frontend") if member.is_ready], self.expected, BOUND_S
        )


def disturbances(
    results: Sequence[RoundResult], victim: str, struck_s: float, healed_s: float, victim_stall_s: float
) -> list[tuple[float, float]]:
    """When sessions began to wait because of the fault, and when each of them had its next token.

    Disturbed is a session with a round that failed or stalled, and that ran between the fault and its end.
    """
    found = []
    for result in results:
        if result.started_s > healed_s:
            continue
        longest_s = victim_stall_s if result.session_id == victim and result.started_s <= struck_s else STALL_S
        found += result.stalls(struck_s, longest_s)
        if result.ending is Ending.FAILED:
            since_s = max(struck_s, *result.token_s[-1:], result.started_s)
            later_s = [
                at_s
                for other in results
                if other.session_id == result.session_id
                for at_s in other.token_s
                if at_s > result.ended_s
            ]
            found += [(since_s, at_s) for at_s in sorted(later_s)[:1]]
    return found


def recover_s(waits: Sequence[tuple[float, float]], struck_s: float, *, lasts: bool) -> float:
    """From the fault to the end of the last wait; of a fault that lasts, the longest wait."""
    if lasts:
        return max((until_s - since_s for since_s, until_s in waits), default=0.0)
    return max((until_s - struck_s for _, until_s in waits), default=0.0)


def p99(values: Sequence[float]) -> float:
    """The 99th percentile by nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0
