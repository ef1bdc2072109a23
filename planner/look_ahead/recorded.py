"""Recent load as sessions that the simulator can serve again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ampd.recent_load import Load, RecentRound, all_rounds
from workloads.trace import Round, Session


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """Sessions of a recorded time, in the order of their arrival.

    Attributes:
        contexts: session id -> tokens of its context before its first recorded round.
        rounds: of all sessions.
        span_s: from the first arrival of a round to the last one.
        mean_output_tokens: of a round.
    """

    sessions: Sequence[Session]
    contexts: Mapping[str, int]
    rounds: int
    span_s: float
    mean_output_tokens: int


def recorded_load(load: Load, stress: float) -> RecordedLoad:
    """The load with the recorded prompts and outputs.

    A round in progress gets the mean output. A session's later rounds come after the pauses that its client made.

    Args:
        stress: arrivals and pauses are this many times as short. Above 1, a short record shows a lack of capacity that
            would otherwise need a long one, because a replay begins with empty queues.
    """
    outputs = [item.output_tokens for item in all_rounds(load) if item.output_tokens is not None]
    mean_tokens = max(round(sum(outputs) / len(outputs)), 1) if outputs else 1
    arrivals = [item.sent_s for item in all_rounds(load)]
    first_s, last_s = min(arrivals, default=0.0), max(arrivals, default=0.0)
    sessions = [
        # The trace's checks ask for a first round without a history, which a session under way does not have.
        Session.model_construct(
            session_id=session_id,
            arrival_s=(rounds[0].sent_s - first_s) / stress,
            rounds=_chain(rounds, mean_tokens, stress),
        )
        for session_id, rounds in load.items()
    ]
    return RecordedLoad(
        sessions=sorted(sessions, key=lambda session: session.arrival_s),
        contexts={session_id: rounds[0].kept_tokens for session_id, rounds in load.items()},
        rounds=sum(len(session.rounds) for session in sessions),
        span_s=(last_s - first_s) / stress,
        mean_output_tokens=mean_tokens,
    )


def _chain(rounds: Sequence[RecentRound], mean_tokens: int, stress: float) -> tuple[Round, ...]:
    """The rounds of one session, up to the first one that had not ended when the next one came."""
    chain: list[Round] = []
    context_tokens = rounds[0].kept_tokens
    ended_s: float | None = None
    for item in rounds:
        if chain and ended_s is None:
            break
        kept_tokens = min(item.kept_tokens, context_tokens)
        increment_tokens = max(item.prompt_tokens - kept_tokens, 1)
        output_tokens = max(item.output_tokens or mean_tokens, 1)
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
