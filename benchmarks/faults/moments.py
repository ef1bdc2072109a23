"""The moments of a round at which a fault strikes, as events in the logs of the graph's processes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Any

from ampd.keys import PAGE_TOKENS, session_key
from benchmarks.faults.cluster import LiveGraph, Member
from benchmarks.faults.load import Agent, Client, Ending, RoundResult
from benchmarks.faults.tokens import Expected
from tests.waiting import until

HISTORY_TOKENS, INCREMENT_TOKENS, LAST_INCREMENT_TOKENS = 480, 320, 80
FIRST_OUTPUT_TOKENS, OUTPUT_TOKENS = 16, 40
BLOCKING_TOKENS = 1600
BLOCKERS_EACH = 2
"""Long prefills for each prefill worker."""
DECODING_FROM_TOKENS = 4
LOCAL = {"presence_penalty": 0.5}
"""An option that keeps a round on its decode worker."""


_POLL_S = 0.01


class Moment(StrEnum):
    """Where the victim's second round is when the fault strikes; `TOOL_GAP`: its session has no round."""

    WAITING = "waiting"
    READING_HISTORY = "reading-history"
    PREFILLING = "prefilling"
    READING_INCREMENT = "reading-increment"
    DECODING = "decoding"
    TOOL_GAP = "tool-gap"

    @property
    def label(self) -> str:
        return self.value.replace("-", " ")


class MissedMomentError(Exception):
    """The round was past the moment when the fault struck; the run proves nothing and is repeated."""


@dataclass
class Victim:
    """The session whose round is struck.

    Attributes:
        agent: its client. url: its frontend.
        round: its second round, from before the fault to its end; None in the tool gap.
    """

    agent: Agent
    url: str
    round: asyncio.Task[RoundResult] | None = None

    @property
    def session_id(self) -> str:
        return self.agent.session_id


class Stage:
    """Brings the victim to a moment, and finds the processes that work for it."""

    def __init__(self, graph: LiveGraph, client: Client, expected: Expected, name: str) -> None:
        self._graph = graph
        self._client = client
        self._expected = expected
        self.name = name
        self._rng = self.rng(name)
        self._is_decoding = asyncio.Event()
        self._idle_blockers: list[Agent] = []
        self._blockers: list[asyncio.Task[RoundResult]] = []
        url = client.next_url()
        self.victim = Victim(Agent(client, expected, f"{name}-victim", self._rng), url)

    @staticmethod
    def rng(name: str) -> random.Random:
        """Every cell has its own prompts, and the same ones in each run."""
        return random.Random(name)

    async def begin(self, moment: Moment) -> None:
        """Run the first round. It is prefilled locally, so that the second one has a history to read.

        The sessions of the blocking prefills begin, too, so that workers that join later get none of them.

        Raises:
            MissedMomentError: it failed.
        """
        if moment is Moment.WAITING:
            for number in range(BLOCKERS_EACH * len(self._graph.of("prefill"))):
                name = blocker_name(self.name, number)
                self._idle_blockers.append(Agent(self._client, self._expected, name, self.rng(name)))
                await self._idle_blockers[-1].round(PAGE_TOKENS, 1, options=LOCAL)
        victim = self.victim
        first = await victim.agent.round(HISTORY_TOKENS, FIRST_OUTPUT_TOKENS, url=victim.url, options=LOCAL)
        if first.ending is not Ending.COMPLETED:
            raise MissedMomentError(f"the round before it: {first.ending}: {first.detail}")

    async def reach(self, moment: Moment) -> None:
        """Run the second round up to the moment.

        Raises:
            MissedMomentError: it never came to the moment.
        """
        if moment is Moment.TOOL_GAP:
            return
        try:
            if moment is Moment.WAITING:
                await self._block()
            self.victim.round = self._second_round()
            await until(lambda: self._is_at(moment), timeout_s=20, poll_s=_POLL_S)
        except TimeoutError:
            raise MissedMomentError(f"{moment}: it did not come") from None

    def check(self, moment: Moment, struck_s: float) -> None:
        """Check that the round was still at the moment.

        Args:
            struck_s: when the fault struck, in seconds since the epoch.

        Raises:
            MissedMomentError: it was not.
        """
        if moment is Moment.DECODING and self.is_over:
            raise MissedMomentError(moment)
        if moment not in _SPANS:
            return
        line = self._line(_SPANS[moment][1])
        if line is not None and _time_s(line) < struck_s:
            raise MissedMomentError(
                f"{moment}: {line['message']!r} came {struck_s - _time_s(line):.3f} s before the fault"
            )

    @property
    def is_over(self) -> bool:
        """Whether the struck round has ended."""
        return self.victim.round is not None and self.victim.round.done()

    def processes(self) -> dict[str, Member]:
        """By kind, the process that the victim's latest round uses; any prefill worker after a local round."""
        graph, session_id = self._graph, self.victim.session_id
        placed = [
            (line, member)
            for member in graph.of("coordinator")
            for line in member.read_log()
            if line.get("message") == "round placed" and line.get("session_id") == session_id
        ]
        line, coordinator = max(placed, key=lambda pair: str(pair[0]["time"]))
        frontend = next(member for member in graph.of("frontend") if member.url == self.victim.url)
        return {
            "coordinator": coordinator,
            "frontend": frontend,
            "decode": graph.worker(line["decode_worker"]),
            "prefill": graph.worker(line.get("prefill_worker") or graph.of("prefill")[0].id),
        }

    def resume(self) -> None:
        """The victim's tools return right after the fault, if they ran."""
        if self.victim.round is None:
            self.victim.round = self._second_round()

    async def cancel(self) -> None:
        """End all requests, because the run has failed. Their connections are closed afterwards."""
        running = [task for task in (self.victim.round, *self._blockers) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def finish(self) -> dict[str, str]:
        """Let the victim's round end, run another, and end the session.

        Returns:
            Session id -> decode worker, from the shared state.
        """
        victim = self.victim
        if victim.round is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await victim.round
        await asyncio.gather(*self._blockers)
        for agent in self._idle_blockers:
            await agent.round(PAGE_TOKENS, 1, is_final=True)
        await victim.agent.round(LAST_INCREMENT_TOKENS, FIRST_OUTPUT_TOKENS)
        store = await self._graph.store()
        try:
            bound = await store.binding(session_key("", victim.session_id))
        finally:
            await store.close()
        await victim.agent.round(PAGE_TOKENS, 1, is_final=True)
        return {victim.session_id: bound.worker_id if bound else "no worker"}

    # -- inside

    def _second_round(self) -> asyncio.Task[RoundResult]:
        victim = self.victim
        return asyncio.create_task(
            victim.agent.round(INCREMENT_TOKENS, OUTPUT_TOKENS, url=victim.url, on_token=self._on_token)
        )

    async def _block(self) -> None:
        """Long prefills on every prefill worker, so that the next one waits."""
        while self._idle_blockers:
            agent = self._idle_blockers.pop()
            self._blockers.append(asyncio.create_task(agent.round(BLOCKING_TOKENS, 1, is_final=True)))
            await until(partial(self._is_queued, agent.session_id), poll_s=_POLL_S)

    def _on_token(self, result: RoundResult) -> None:
        if len(result.token_s) >= DECODING_FROM_TOKENS:
            self._is_decoding.set()

    def _is_at(self, moment: Moment) -> bool:
        if moment is Moment.DECODING:
            return self._is_decoding.is_set()
        return self._line(_SPANS[moment][0]) is not None

    def _line(self, mark: Mark) -> dict[str, Any] | None:
        lines = [
            line
            for member in self._graph.members
            if member.kind == mark.kind
            for line in member.read_log()
            if mark.fits(line, self.victim.session_id)
        ]
        return min(lines, key=lambda line: str(line["time"]), default=None)

    def _is_queued(self, session_id: str) -> bool:
        return any(_QUEUED.fits(line, session_id) for member in self._graph.of("prefill") for line in member.read_log())


def blocker_name(run: str, number: int) -> str:
    """Session of a long prefill before the victim's."""
    return f"{run}-blocker-{number}"


@dataclass(frozen=True)
class Mark:
    """A log line of a session, in the logs of one kind of worker."""

    kind: str
    message: str
    part: str | None = None

    def fits(self, line: dict[str, Any], session_id: str) -> bool:
        return (
            line.get("message") == self.message
            and line.get("session_id") == session_id
            and self.part in (None, line.get("part"))
        )


_QUEUED = Mark("prefill", "prefill queued")
_PICKED = Mark("prefill", "prefill picked")
_HISTORY_READ = Mark("prefill", "KV read", "history")
_PREFILLED = Mark("prefill", "prefill done")
_INCREMENT_READ = Mark("decode", "KV read", "increment")

_SPANS = {
    Moment.WAITING: (_QUEUED, _PICKED),
    Moment.READING_HISTORY: (_PICKED, _HISTORY_READ),
    Moment.PREFILLING: (_HISTORY_READ, _PREFILLED),
    Moment.READING_INCREMENT: (_PREFILLED, _INCREMENT_READ),
}
"""The lines between which a moment lies."""


def _time_s(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()
