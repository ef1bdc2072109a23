"""The KV that the sessions of a case need at the same time."""

from dataclasses import replace

import pytest

from planner.layout.fluid import demand_of, mean_stay
from workloads.trace import Session, SharedPrefix

from .lab import CASE, MODEL, SESSIONS


def test_memory_is_planned_for_more_sessions_than_the_mean_and_less_so_where_there_are_many() -> None:
    few, many = (demand_of(replace(CASE, rate=rate)) for rate in (0.1, 1000.0))
    assert few.resident_kv_tokens / 0.1 > many.resident_kv_tokens / 1000.0


def test_residence_counts_tools_and_grows_with_the_context() -> None:
    quick = tuple(
        session.model_copy(update={"rounds": tuple(item.model_copy(update={"tool_s": 0.0}) for item in session.rounds)})
        for session in SESSIONS
    )
    tools_s = sum(item.tool_s for session in SESSIONS for item in session.rounds) / len(SESSIONS)
    stay, quick_stay = mean_stay(SESSIONS, MODEL), mean_stay(quick, MODEL)
    assert stay.lifetime_s - quick_stay.lifetime_s == pytest.approx(tools_s)
    assert stay.resident_token_s > quick_stay.resident_token_s
    assert (stay.running_s, stay.running_token_s) == (quick_stay.running_s, quick_stay.running_token_s)
    assert quick_stay.resident_token_s == pytest.approx(quick_stay.running_token_s)


def behind(session: Session, tokens: int, *, shared: bool) -> Session:
    """A session after a system prompt."""
    first, *later = session.rounds
    rounds = (first.model_copy(update={"incr_tokens": tokens + first.incr_tokens}), *later)
    prefix = SharedPrefix(id="system", tokens=tokens) if shared else None
    return session.model_copy(update={"rounds": rounds, "shared_prefix": prefix})


def test_a_shared_prefix_is_neither_work_nor_memory_of_a_session() -> None:
    whole, shared = (tuple(behind(session, 5000, shared=each) for session in SESSIONS) for each in (False, True))
    stay, shared_stay = mean_stay(whole, MODEL), mean_stay(shared, MODEL)
    # 5000 tokens a session for all of its time, and the time of their prefill.
    saved = stay.resident_token_s - shared_stay.resident_token_s
    assert saved > 5000 * shared_stay.lifetime_s
    theta = max(MODEL.parallelisms, key=lambda theta: theta.tp)
    assert stay.running_s - shared_stay.running_s == pytest.approx(
        sum(
            MODEL.prefill_s(0, 5000 + item.rounds[0].incr_tokens, theta)
            - MODEL.prefill_s(5000, item.rounds[0].incr_tokens, theta)
            for item in SESSIONS
        )
        / len(SESSIONS)
    )
