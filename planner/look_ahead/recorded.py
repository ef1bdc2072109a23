"""The recent load and the present state of a cluster, as sessions that the simulator can serve again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import groupby

from ampd.policies.base import PoolsSituation
from ampd.recent_load import Load, RecentRound, all_rounds
from ampd.types import Role, WorkerView
from planner.simulator.options import UnderWay
from workloads.trace import Round, Session


@dataclass(frozen=True, slots=True)
class Decoding:
    """A round that decodes now. `tokens`, `token_s`: its output so far and the time between two tokens, estimates."""

    session_id: str
    worker_id: str
    item: RecentRound
    tokens: int
    token_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """A round whose prefill waits or runs. `worker_id`: in whose queue it is; "": that is not known."""

    session_id: str
    worker_id: str
    item: RecentRound
    waited_s: float


@dataclass(frozen=True, slots=True)
class Present:
    """What a replay begins with.

    Attributes:
        owners: session -> the worker that holds its KV as its owner, as far as views tell.
        decoding: the rounds that decode.
        waiting: the rounds whose prefills wait or run.
        held_tokens: session -> the tokens that its owner holds. Where memory is short, they are fewer than its context.
    """

    owners: Mapping[str, str]
    decoding: Sequence[Decoding]
    waiting: Sequence[Waiting]
    held_tokens: Mapping[str, int] = field(default_factory=dict)


NOTHING_PRESENT = Present({}, (), ())
"""An empty cluster."""


def present_state(situation: PoolsSituation) -> Present:
    """Read off the views and the recent load.

    Views tell how many rounds decode on a worker, and not which ones. If a worker holds the session of a round, the
    round is on that worker. The other rounds, mostly first rounds, are spread so that each worker gets its number.
    Rounds that are left over are on their way.
    """
    queued = {task.session_id: view.worker_id for view in situation.workers for task in view.queue}
    owners = _owners(situation.workers)
    running = {name: rounds[-1] for name, rounds in situation.load.items() if rounds[-1].ended_s is None}
    placed = _placed([name for name in running if name not in queued], owners, situation.workers)
    views = {view.worker_id: view for view in situation.workers}
    first_token_s = _first_token_s(situation.workers)
    decoding = [
        _decoding(situation, name, running[name], views[worker_id], first_token_s) for name, worker_id in placed.items()
    ]
    waiting = [
        Waiting(name, queued.get(name, ""), item, max(situation.now_s - item.sent_s, 0.0))
        for name, item in running.items()
        if name not in placed
    ]
    held_tokens = {name: views[worker_id].held_tokens.get(name, 0) for name, worker_id in owners.items()}
    return Present(owners, decoding, waiting, held_tokens)


def _placed(sessions: Sequence[str], owners: Mapping[str, str], workers: Sequence[WorkerView]) -> dict[str, str]:
    """Session -> the worker on which its round decodes. A worker gets as many as its batch holds."""
    free = {view.worker_id: view.decode_batch for view in workers}
    placed: dict[str, str] = {}
    for name in sorted(sessions, key=lambda name: not free.get(owners.get(name, ""))):
        owner = owners.get(name, "")
        worker_id = owner if free.get(owner) else max(free, key=free.__getitem__)
        if not free[worker_id]:
            break
        free[worker_id] -= 1
        placed[name] = worker_id
    return placed


def _first_token_s(workers: Sequence[WorkerView]) -> float:
    """The mean of the measured times to the first token; 0: nothing was measured."""
    count = sum(view.ttft.count for view in workers)
    return sum(view.ttft.mean_s * view.ttft.count for view in workers) / count if count else 0.0


def _decoding(
    situation: PoolsSituation, name: str, item: RecentRound, worker: WorkerView, first_token_s: float
) -> Decoding:
    """The output of a round so far, estimated from the time that it has decoded."""
    model, theta = situation.model, worker.parallelism
    prefill_s = model.prefill_s(item.kept_tokens, max(item.prompt_tokens - item.kept_tokens, 1), theta)
    token_s = worker.itl.mean_s if worker.itl.count else 0.0
    token_s = token_s or model.decode_step_s(max(worker.decode_batch, 1), worker.decode_context_tokens, theta)
    decoded_s = situation.now_s - item.sent_s - max(prefill_s, first_token_s)
    return Decoding(name, worker.worker_id, item, max(round(decoded_s / token_s), 1), token_s)


def _owners(workers: Sequence[WorkerView]) -> dict[str, str]:
    owners: dict[str, str] = {}
    for view in workers:
        if view.role is Role.DECODE:
            owners |= {task.session_id: view.worker_id for task in view.queue}
        if view.role.owns_sessions:
            owners |= {session_id: view.worker_id for session_id, tokens in view.held_tokens.items() if tokens}
    return owners


class OutputLengths:
    """The lengths of recent outputs, of which some still grow (Kaplan and Meier, 1958).

    The rounds that have ended would alone make outputs look shorter than they are, because long outputs are the last to
    end after a change of the load.

    Args:
        ended: output tokens of the rounds that have ended.
        growing: output tokens so far of the rounds in progress.
    """

    def __init__(self, ended: Sequence[int], growing: Sequence[int]) -> None:
        observed = sorted([(tokens, True) for tokens in ended] + [(tokens, False) for tokens in growing])
        self._longest = observed[-1][0] if observed else 0
        self._steps: list[tuple[int, float]] = []
        """(tokens, share of the outputs that are longer)."""
        at_risk, share = len(observed), 1.0
        for tokens, group in groupby(observed, key=lambda item: item[0]):
            outcomes = [is_ended for _, is_ended in group]
            share *= 1 - sum(outcomes) / at_risk
            at_risk -= len(outcomes)
            self._steps.append((tokens, share))

    def expected(self, tokens: int = 0) -> int:
        """The expected length of an output that has `tokens` already.

        Nothing is known about outputs longer than the longest one so far. An output of that length is expected to
        become twice as long.
        """
        if tokens >= self._longest:
            return max(2 * tokens, 1)
        alive, area, before, share = 0.0, 0.0, tokens, 1.0
        for end, after in self._steps:
            if end <= tokens:
                share = after
                continue
            alive = alive or share
            area += share * (end - before)
            before, share = end, after
        area += share * self._longest
        return max(tokens + round(area / alive), tokens + 1) if alive else max(2 * tokens, 1)


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """Sessions of a recorded time, in the order of their arrival.

    Attributes:
        under_way: session id -> how far the session is when the replay begins, with the ids of the real workers.
        counted: ids of the sessions whose rounds count. The others are load only.
        span_s: from the first arrival of a round to the last one.
        mean_output_tokens: of a round.
        decoding: session id -> its round that decodes when the replay begins. Its output so far counts in its ITL.
    """

    sessions: Sequence[Session]
    under_way: Mapping[str, UnderWay]
    counted: AbstractSet[str]
    span_s: float
    mean_output_tokens: int
    decoding: Mapping[str, Decoding] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """How many rounds count."""
        return sum(len(session.rounds) for session in self.sessions if session.session_id in self.counted)


def recorded_load(load: Load, present: Present = NOTHING_PRESENT, outputs: Load | None = None) -> RecordedLoad:
    """The load with the recorded prompts and outputs, behind the rounds that are in progress now.

    Rounds in progress that wait do not count, because other roles could not change whether they are late. The output of
    a round in progress is estimated. A session's later rounds come after the pauses that its client made.

    Args:
        present: what the replay begins with.
        outputs: the rounds that tell how long outputs are; None: those of `load`. They should reach back to the start
            of the oldest round in progress, because in a shorter time only short outputs have ended.
    """
    lengths = _lengths(load if outputs is None else outputs, present)
    so_far = {each.session_id: each.tokens for each in present.decoding}
    arrivals = [item.sent_s for item in all_rounds(load)]
    first_s, last_s = min(arrivals, default=0.0), max(arrivals, default=0.0)
    sessions = [
        # The trace's checks ask for a first round without a history, which a session under way does not have.
        Session.model_construct(
            session_id=session_id,
            arrival_s=rounds[0].sent_s - first_s,
            rounds=_chain(rounds, lengths.expected(so_far.get(session_id, 0))),
        )
        for session_id, rounds in load.items()
    ]
    begun, under_way = _in_progress(present, lengths)
    under_way |= {
        session_id: UnderWay(rounds[0].kept_tokens, present.owners.get(session_id, ""))
        for session_id, rounds in load.items()
        if rounds[0].kept_tokens
    }
    all_outputs = [item.output_tokens for session in sessions for item in session.rounds]
    return RecordedLoad(
        sessions=begun + sorted(sessions, key=lambda session: session.arrival_s),
        under_way=under_way,
        counted=frozenset(load) | frozenset(_NOW + each.session_id for each in present.decoding),
        span_s=last_s - first_s,
        decoding={_NOW + each.session_id: each for each in present.decoding},
        mean_output_tokens=max(round(sum(all_outputs) / len(all_outputs)), 1) if all_outputs else 1,
    )


_NOW = "now/"
"""Before the ids of sessions whose rounds are in progress. They may come again in the recorded load."""


def _lengths(load: Load, present: Present) -> OutputLengths:
    ended = [item.output_tokens for item in all_rounds(load) if item.output_tokens is not None]
    arrived = {id(item) for item in all_rounds(load)}
    growing = [each.tokens for each in present.decoding if id(each.item) in arrived]
    return OutputLengths(ended, growing)


def _in_progress(present: Present, lengths: OutputLengths) -> tuple[list[Session], dict[str, UnderWay]]:
    """What is left of the rounds in progress, and where they are. The rounds that decode come last."""
    sessions: list[Session] = []
    under_way: dict[str, UnderWay] = {}
    for queued in present.waiting:
        kept_tokens = min(queued.item.kept_tokens, present.held_tokens.get(queued.session_id, 0))
        increment_tokens = queued.item.prompt_tokens - kept_tokens
        sessions.append(_of_one_round(queued.session_id, kept_tokens, increment_tokens, lengths.expected()))
        owner = present.owners.get(queued.session_id, "")
        under_way[_NOW + queued.session_id] = UnderWay(kept_tokens, owner, queued.worker_id, queued.waited_s)
    # Memory that is short loses the KV that came first. The batch's is in use and cannot go.
    for each in present.decoding:
        context_tokens = each.item.prompt_tokens + each.tokens
        rest = lengths.expected(each.tokens) - each.tokens
        sessions.append(_of_one_round(each.session_id, context_tokens, 1, rest))
        under_way[_NOW + each.session_id] = UnderWay(context_tokens, each.worker_id, each.worker_id)
    return sessions, under_way


def _of_one_round(session_id: str, kept_tokens: int, increment_tokens: int, output_tokens: int) -> Session:
    item = _round(kept_tokens, increment_tokens, output_tokens, 0.0)
    return Session.model_construct(session_id=_NOW + session_id, arrival_s=0.0, rounds=(item,))


def _chain(rounds: Sequence[RecentRound], expected_tokens: int) -> tuple[Round, ...]:
    """The rounds of one session, up to the first one that had not ended when the next one came."""
    chain: list[Round] = []
    context_tokens = rounds[0].kept_tokens
    ended_s: float | None = None
    for item in rounds:
        if chain and ended_s is None:
            break
        kept_tokens = min(item.kept_tokens, context_tokens)
        tool_s = 0.0 if ended_s is None else max(item.sent_s - ended_s, 0.0)
        chain.append(
            _round(kept_tokens, item.prompt_tokens - kept_tokens, item.output_tokens or expected_tokens, tool_s)
        )
        context_tokens = kept_tokens + chain[-1].incr_tokens + chain[-1].output_tokens
        ended_s = item.ended_s
    return tuple(chain)


def _round(kept_tokens: int, increment_tokens: int, output_tokens: int, tool_s: float) -> Round:
    """A round of a trace. At least one token of its prompt is computed, and at least one is generated."""
    return Round.model_construct(
        incr_tokens=max(increment_tokens, 1),
        output_tokens=max(output_tokens, 1),
        tool_s=tool_s,
        keep_tokens=kept_tokens,
        text=None,
    )
