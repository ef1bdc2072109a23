"""The recent load, as sessions that the simulator can serve again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from ampd.recent_load import Load, RecentRound, all_rounds
from planner.look_ahead.lengths import OutputLengths
from planner.look_ahead.present import NOTHING_PRESENT, Present
from planner.simulator.options import UnderWay
from workloads.trace import Round, Session


class Decoded(NamedTuple):
    """The output of a round so far: the tokens, and the time between two of them."""

    tokens: int
    token_s: float


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """Sessions of a recorded time, in the order of their arrival.

    Attributes:
        under_way: session id -> how far the session is when the replay begins, with the ids of the real workers.
        counted: ids of the sessions whose rounds count. The others are load only.
        span_s: from the first arrival of a round to the last one.
        mean_output_tokens: of a round.
        decoded: session id -> the output of its round before the replay begins, which counts in the round's ITL.
    """

    sessions: Sequence[Session]
    under_way: Mapping[str, UnderWay]
    counted: AbstractSet[str]
    span_s: float
    mean_output_tokens: int
    decoded: Mapping[str, Decoded] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """How many rounds count."""
        return sum(len(session.rounds) for session in self.sessions if session.session_id in self.counted)


def recorded_load(
    load: Load, stress: float, present: Present = NOTHING_PRESENT, outputs: Load | None = None
) -> RecordedLoad:
    """The load with the recorded prompts and outputs, behind the rounds that are in progress now.

    Rounds in progress that wait do not count, because other roles could not change whether they are late. The output of
    a round in progress is estimated. A session's later rounds come after the pauses that its client made.

    Args:
        stress: arrivals and pauses are this many times as short. With a stress above 1, a short record shows a lack of
            capacity that otherwise only a long record would show.
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
            arrival_s=(rounds[0].sent_s - first_s) / stress,
            rounds=_chain(rounds, lengths.expected(so_far.get(session_id, 0)), stress),
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
        span_s=(last_s - first_s) / stress,
        decoded={_NOW + each.session_id: Decoded(each.tokens, each.token_s) for each in present.decoding},
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
        increment_tokens = max(queued.item.prompt_tokens - kept_tokens, 1)
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
    item = Round.model_construct(
        incr_tokens=increment_tokens,
        output_tokens=max(output_tokens, 1),
        tool_s=0.0,
        keep_tokens=kept_tokens,
        text=None,
    )
    return Session.model_construct(session_id=_NOW + session_id, arrival_s=0.0, rounds=(item,))


def _chain(rounds: Sequence[RecentRound], expected_tokens: int, stress: float) -> tuple[Round, ...]:
    """The rounds of one session, up to the first one that had not ended when the next one came."""
    chain: list[Round] = []
    context_tokens = rounds[0].kept_tokens
    ended_s: float | None = None
    for item in rounds:
        if chain and ended_s is None:
            break
        kept_tokens = min(item.kept_tokens, context_tokens)
        increment_tokens = max(item.prompt_tokens - kept_tokens, 1)
        output_tokens = max(item.output_tokens or expected_tokens, 1)
        chain.append(
            Round.model_construct(
                incr_tokens=increment_tokens,
                output_tokens=output_tokens,
                tool_s=0.0 if ended_s is None else max(item.sent_s - ended_s, 0.0) / stress,
                keep_tokens=kept_tokens,
                text=None,
            )
        )
        context_tokens = kept_tokens + increment_tokens + output_tokens
        ended_s = item.ended_s
    return tuple(chain)
