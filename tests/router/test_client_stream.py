"""The chunks that a client gets: its own token counts, the decision record where it asked for it, TTFT and ITL."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.types import Slo
from router.client_stream import ClientStream
from router.decision_record import DecisionRecord, RoundFacts
from router.request import parse_round
from router.targets import TargetLimits

PROMPT = [1] * 10


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def stream_of(clock: Clock, *, choices: int = 1, wants_record: bool = False) -> tuple[ClientStream, DecisionRecord]:
    fields = ["engine_data"] if wants_record else []
    request = {"token_ids": PROMPT, "sampling_options": {"n": choices}}
    record = DecisionRecord(RoundFacts("s", "ampd"))
    parsed = parse_round({**request, "extra_args": {"nvext": {"extra_fields": fields}}}, TargetLimits(Slo(1.0, 0.1)))
    return ClientStream(parsed, record, clock), record


chunks = st.lists(
    st.tuples(st.floats(0, 3), st.integers(0, 1), st.lists(st.integers(0, 99), max_size=4)), min_size=1, max_size=12
)


@given(chunks)
def test_ttft_and_itl_are_those_of_the_tokens_that_came_out(arrivals: list[tuple[float, int, list[int]]]) -> None:
    """Chunks as (seconds since the one before, choice, tokens)."""
    clock = Clock()
    stream, record = stream_of(clock, choices=2)
    first_s: float | None = None
    times_s: list[float] = []
    for wait_s, index, token_ids in arrivals:
        clock.now_s += wait_s
        stream.count({"index": index, "token_ids": token_ids})
        if token_ids and first_s is None:
            first_s = clock.now_s
        times_s += [clock.now_s] * (len(token_ids) if index == 0 else 0)
    served = stream.served(is_initial=True, was_left=False)
    assert stream.emitted == [token for _, index, token_ids in arrivals if index == 0 for token in token_ids]
    assert served.output_tokens == len(times_s)
    assert served.ttft_s == record.ttft_s == (None if first_s is None else pytest.approx(first_s - 100.0))
    if len(times_s) < 2 or first_s is None:
        assert served.itl_s is None
    else:
        assert served.itl_s == pytest.approx((times_s[-1] - first_s) / (len(times_s) - 1))
    assert served.lasted_s == pytest.approx(clock.now_s - 100.0)


def usage(completion: int, cached: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    return {"prompt_tokens": 99, "completion_tokens": completion, "prompt_tokens_details": details}


def test_the_usage_is_that_of_all_parts_of_the_round() -> None:
    stream, _ = stream_of(Clock())
    chunk = {"index": 0, "token_ids": [7], "completion_usage": usage(5, cached=3)}
    stream.finish_choice(chunk, tokens_before=0, has_report=True)
    assert chunk["completion_usage"] == usage(5, cached=3), "one worker ran all of it"

    stream, _ = stream_of(Clock())
    stream.prefilled_cached_tokens = 4
    chunk = {"index": 0, "token_ids": [7], "completion_usage": usage(5, cached=10)}
    stream.finish_choice(chunk, tokens_before=2, has_report=True)
    merged = chunk["completion_usage"]
    assert isinstance(merged, dict)
    assert (merged["prompt_tokens"], merged["completion_tokens"], merged["total_tokens"]) == (10, 7, 17)
    assert merged["prompt_tokens_details"] == {"cached_tokens": 4}


def test_a_round_is_complete_with_its_last_choice() -> None:
    stream, _ = stream_of(Clock(), choices=2)
    assert not stream.has_finished_choice
    stream.finish_choice({"index": 0}, 0, has_report=False)
    assert (stream.has_finished_choice, stream.is_complete) == (True, False)
    stream.finish_choice({"index": 1}, 0, has_report=True)
    assert stream.is_complete


@pytest.mark.parametrize("wants_record", [False, True])
def test_the_record_comes_with_the_first_tokens_and_at_the_end_if_asked_for(wants_record: bool) -> None:
    stream, _ = stream_of(Clock(), choices=2, wants_record=wants_record)
    sent: list[dict[str, Any]] = [
        {"index": 0, "token_ids": []},
        {"index": 0, "token_ids": [1], "engine_data": {"mine": 1}},
        {"index": 1, "token_ids": [2]},
    ]
    for chunk in sent:
        stream.count(chunk)
    ends: list[dict[str, Any]] = [{"index": 0}, {"index": 1}]
    stream.finish_choice(ends[0], 0, has_report=False)
    stream.finish_choice(ends[1], 0, has_report=False)
    with_record = [index for index, chunk in enumerate(sent + ends) if "ampd" in chunk.get("engine_data", {})]
    assert with_record == ([1, 4] if wants_record else [])
    assert sent[1]["engine_data"]["mine"] == 1
