"""One prefill and one decode worker against a second opinion: token by token, from the text of the method alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings

from ampd.perf.model import PerformanceModel
from ampd.serving.prefill_queue import PREFETCH
from ampd.types import Parallelism
from planner.simulator.options import Cluster, ReplicaGroup
from workloads.trace import Session, kept_tokens

from .lab import APART, REMOTE, run, session_lists

PAGE = 16
PREFILL, DECODE = Parallelism(1), Parallelism(2)
"""Not equal, so that nothing lasts equally long on both: who is first of two at one moment is no matter here."""


@dataclass
class One:
    """A round on its way. `held`: KV at the two workers, one table for all rounds of a session."""

    name: str
    index: int
    sent_s: float
    prompt: int
    output: int
    hist: int
    held: dict[str, int]
    ready: bool = False
    read: int = 0
    first_s: float = 0.0
    left: int = 0
    context: int = 0


@dataclass
class Wire:
    """One direction of the link; whoever uses it gets an equal share."""

    moves: list[list[float]] = field(default_factory=list)
    ends: list[Callable[[], None]] = field(default_factory=list)

    def start(self, seconds: float, end: Callable[[], None]) -> None:
        self.moves.append([seconds])
        self.ends.append(end)

    def next_s(self, now_s: float) -> float:
        return now_s + min(left for (left,) in self.moves) * len(self.moves) if self.moves else float("inf")

    def advance(self, seconds: float) -> None:
        for move in self.moves:
            move[0] -= seconds / len(self.moves)

    def end_first(self) -> None:
        first = min(range(len(self.moves)), key=lambda number: self.moves[number][0])
        del self.moves[first]
        self.ends.pop(first)()


class Oracle:
    """All prefills remote, first come first served, memory without limit, reads of whole pages."""

    def __init__(self, sessions: list[Session], model: PerformanceModel) -> None:
        self.sessions, self.model = {session.session_id: session for session in sessions}, model
        self.now_s = 0.0
        self.due = [(session.arrival_s, number, session.session_id, 0) for number, session in enumerate(sessions)]
        self.entered = len(sessions)
        self.contexts = dict.fromkeys(self.sessions, 0)
        self.held = {name: {"prefill": 0, "decode": 0} for name in self.sessions}
        self.queue: list[One] = []
        self.picked: list[One] = []
        self.computing: One | None = None
        self.computed_s = self.decoded_s = float("inf")
        self.to_prefill, self.to_decode = Wire(), Wire()
        self.handed: list[One] = []
        self.passing: list[One] = []
        self.batch: list[One] = []
        self.times: dict[tuple[str, int], tuple[float, float, float]] = {}

    def run(self) -> dict[tuple[str, int], tuple[float, float, float]]:
        while True:
            self.start_prefills()
            self.start_decoding()
            events: list[tuple[float, int, Callable[[], None]]] = [
                (self.computed_s, 0, self.end_prefill),
                (self.decoded_s, 1, self.end_decoding),
                (self.to_prefill.next_s(self.now_s), 2, self.to_prefill.end_first),
                (self.to_decode.next_s(self.now_s), 3, self.to_decode.end_first),
            ]
            if self.due:
                events.append((min(self.due)[0], 4, self.arrive))
            when_s, _, action = min(events, key=lambda event: event[:2])
            if when_s == float("inf"):
                return self.times
            for wire in (self.to_prefill, self.to_decode):
                wire.advance(when_s - self.now_s)
            self.now_s = when_s
            action()

    def arrive(self) -> None:
        self.due.remove(first := min(self.due))
        sent_s, _, name, index = first
        item, held = self.sessions[name].rounds[index], self.held[name]
        kept = kept_tokens(item, self.contexts[name])
        for worker in held:
            held[worker] = min(held[worker], kept // PAGE * PAGE)
        prompt = kept + item.incr_tokens
        hist = min(kept, held["decode"], prompt - 1)
        self.contexts[name] = prompt + item.output_tokens
        self.queue.append(One(name, index, sent_s, prompt, item.output_tokens, hist, held))

    # -- the prefill worker

    def start_prefills(self) -> None:
        while True:
            if self.picked and self.picked[0].ready and self.computing is None:
                each = self.computing = self.picked.pop(0)
                behind = each.held["prefill"] + each.read
                self.computed_s = self.now_s + self.model.prefill_s(behind, each.prompt - behind, PREFILL)
                continue
            free = 1 - (self.computing is not None) - len(self.picked)
            if self.queue and free + PREFETCH > 0 and (free > 0 or self.queue[0].hist > 0):
                self.pick(self.queue.pop(0))
                continue
            return

    def pick(self, each: One) -> None:
        self.picked.append(each)
        each.read = max(each.hist - each.held["prefill"], 0)

        def arrived() -> None:
            each.ready = True

        if each.read:
            self.to_prefill.start(self.model.kv_transfer_s(each.read, DECODE, PREFILL), arrived)
        else:
            each.ready = True

    def end_prefill(self) -> None:
        each = self.computing
        assert each is not None
        self.computing, self.computed_s = None, float("inf")
        each.first_s = self.now_s
        each.held["prefill"] = each.prompt // PAGE * PAGE
        each.read = max(each.held["prefill"] - each.held["decode"], 0)
        if each.read:
            seconds = self.model.kv_transfer_s(each.read, PREFILL, DECODE)
            self.to_decode.start(seconds, lambda: self.handed.append(each))
        else:
            self.handed.append(each)

    # -- the decode worker

    def start_decoding(self) -> None:
        if self.decoded_s != float("inf"):
            return
        if self.handed:
            self.passing, self.handed = self.handed, []
            parts = []
            for each in self.passing:
                behind = each.held["decode"] + each.read
                parts.append((behind, each.prompt + 1 - behind))
            tokens = sum(incr for _, incr in parts)
            hist = sum(hist * incr for hist, incr in parts) // tokens
            self.decoded_s = self.now_s + self.model.prefill_s(hist, tokens, DECODE)
        elif self.batch:
            context = sum(each.context for each in self.batch)
            self.decoded_s = self.now_s + self.model.decode_step_s(len(self.batch), context, DECODE)

    def end_decoding(self) -> None:
        self.decoded_s = float("inf")
        if self.passing:
            stepped, self.passing = self.passing, []
            for each in stepped:
                each.left, each.context = each.output - 1, each.prompt + 1
            self.batch += stepped
        else:
            stepped = self.batch
        for each in stepped:
            each.left -= 1
            each.context += 1
        self.batch = [each for each in self.batch if each.left]
        for each in stepped:
            if not each.left:
                self.end(each)

    def end(self, each: One) -> None:
        each.held["decode"] = (each.prompt + each.output - 1) // PAGE * PAGE
        self.times[each.name, each.index] = (each.sent_s, each.first_s - each.sent_s, self.now_s - each.sent_s)
        rounds = self.sessions[each.name].rounds
        if each.index + 1 < len(rounds):
            # Who comes at the same time as another one comes in the order in which they ended.
            self.due.append((self.now_s + rounds[each.index + 1].tool_s, self.entered, each.name, each.index + 1))
            self.entered += 1


def _longer(sessions: list[Session]) -> list[Session]:
    """At least two tokens a round: what happens to the KV of shorter ones is a test of its own."""
    return [
        session.model_copy(
            update={
                "rounds": tuple(
                    item.model_copy(update={"output_tokens": item.output_tokens + 1}) for item in session.rounds
                )
            }
        )
        for session in sessions
    ]


@pytest.mark.slow
@settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))
@given(session_lists(most=6, least_tool_s=0.001))
def test_a_prefill_and_a_decode_worker_equal_the_oracle(sessions: list[Session]) -> None:
    sessions = _longer(sessions)
    cluster = Cluster(decode=(ReplicaGroup(1, DECODE),), prefill=(ReplicaGroup(1, PREFILL),))
    done = run(sessions, cluster, REMOTE, model=APART)
    expected = Oracle(sessions, APART).run()
    assert {(record.session_id, record.index) for record in done.rounds} == set(expected)
    for record in done.rounds:
        sent_s, ttft_s, e2e_s = expected[record.session_id, record.index]
        assert record.sent_s == pytest.approx(sent_s, rel=1e-9)
        assert record.ttft_s == pytest.approx(ttft_s, rel=1e-9, abs=1e-9)
        assert record.e2e_s == pytest.approx(e2e_s, rel=1e-9, abs=1e-9)
