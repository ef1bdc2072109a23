"""The chunks that a client gets: its own token counts, the decision record where it asked for it, TTFT and ITL."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.round_end import LINK
from tests.virtual_time import virtually
from tests.workers.rounds_lab import message
from workers import client_stream
from workers.client_stream import ClientStream, ends_at_prefill, signs_of_life

PROMPT = [1] * 10
REPORT = {
    **dict.fromkeys(("held_tokens", "cached_tokens", "kv_read_tokens", "kv_read_bytes"), 4),
    **dict.fromkeys(("queued_s", "prefill_s", "kv_read_s"), 0.5),
}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def call(*, choices: int = 1, wants_record: bool = False, continued: int = 0, **stops: Any) -> Any:
    request: Any = message(PROMPT, 50, "s", sampling_options={"n": choices})
    request["request"]["stop_conditions"] |= stops
    record = {"route": "remote", "retries": 0} if wants_record else None
    tokens = len(PROMPT) - continued
    start = {"request_id": "r", "tell": "", "age_s": 0.0, "link": {"span_id": "7"}, "prompt_tokens": tokens}
    request["start"] = {**start, "continued_tokens": continued, "record": record}
    return request


chunks = st.lists(
    st.tuples(st.floats(0, 3), st.integers(0, 1), st.lists(st.integers(0, 99), max_size=4)), min_size=1, max_size=12
)


@given(chunks)
def test_ttft_and_itl_are_those_of_the_tokens_that_came_out(arrivals: list[tuple[float, int, list[int]]]) -> None:
    """Chunks as (seconds since the one before, choice, tokens)."""
    clock = Clock()
    stream = ClientStream(call(choices=2), clock)
    first_s: float | None = None
    times_s: list[float] = []
    for wait_s, index, token_ids in arrivals:
        clock.now_s += wait_s
        chunk = stream.decoded({"index": index, "token_ids": token_ids})
        assert (LINK in chunk) == (bool(token_ids) and first_s is None)
        if token_ids and first_s is None:
            first_s = clock.now_s
        times_s += [clock.now_s] * (len(token_ids) if index == 0 else 0)
    ended = stream.ended("left")
    assert stream.tokens == [token for _, index, token_ids in arrivals if index == 0 for token in token_ids]
    assert ended.ttft_s == (None if first_s is None else pytest.approx(first_s - 100.0))
    if len(times_s) < 2 or first_s is None:
        assert ended.itl_s is None
    else:
        assert ended.itl_s == pytest.approx((times_s[-1] - first_s) / (len(times_s) - 1))


def usage(completion: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": 99,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def test_the_usage_is_that_of_all_parts_of_the_round() -> None:
    last: dict[str, Any] = {"token_ids": [7], "finish_reason": "length", "completion_usage": usage(5, cached=3)}
    assert ClientStream(call(), Clock()).decoded(dict(last))["completion_usage"] == usage(5, cached=3)

    stream = ClientStream(call(continued=2), Clock())
    stream.prefilled({"token_ids": [9], "ampd": REPORT}, None)
    merged = stream.decoded(dict(last))["completion_usage"]
    assert (merged["prompt_tokens"], merged["completion_tokens"], merged["total_tokens"]) == (8, 8, 16)
    assert merged["prompt_tokens_details"] == {"cached_tokens": 4}


def test_a_round_is_complete_with_its_last_choice_and_its_record_comes_twice() -> None:
    stream = ClientStream(call(choices=2, wants_record=True), Clock())
    sent: list[dict[str, Any]] = [
        {"index": 0, "token_ids": []},
        {"index": 0, "token_ids": [1], "engine_data": {"mine": 1}},
        {"index": 1, "token_ids": [2]},
        {"index": 0, "token_ids": [], "finish_reason": "stop"},
    ]
    for chunk in sent:
        stream.decoded(chunk)
    assert not stream.is_complete
    sent.append(stream.decoded({"index": 1, "token_ids": [], "finish_reason": "stop", "ampd": REPORT}))
    assert stream.is_complete
    assert [index for index, chunk in enumerate(sent) if "ampd" in chunk.get("engine_data", {})] == [1, 4]
    assert sent[1]["engine_data"]["mine"] == 1
    assert sent[4]["engine_data"]["ampd"]["queued_s"] == 0.5
    assert stream.ended("complete").decode == REPORT


def test_the_first_chunk_of_a_split_round_keeps_tokens_and_logprobs_only() -> None:
    stream = ClientStream(call(), Clock())
    chunk = {"token_ids": [1], "log_probs": [-1.0], "index": 0, "finish_reason": "length", "completion_usage": {}}
    first = stream.prefilled({**chunk, "ampd": REPORT, "stop_reason": 1}, None)
    assert first == {"token_ids": [1], "log_probs": [-1.0], "index": 0, LINK: {"span_id": "7"}}
    last = ClientStream(call(), Clock()).prefilled({**chunk, "stop_reason": 1}, "stop")
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", 1)
    assert last["completion_usage"]["completion_tokens"] == 1


def ends(chunk: dict[str, Any], context_limit: int = 1000, **stops: Any) -> str | None:
    request = call(**{"max_tokens": None, **stops})
    request["request"]["eos_token_ids"] = [3, 4]
    return ends_at_prefill(chunk, request, context_limit)


def test_where_a_round_ends_with_its_first_token() -> None:
    assert ends({"token_ids": [9]}) is None
    assert ends({"token_ids": [9], "finish_reason": "length"}, max_tokens=2) is None
    assert ends({"token_ids": [3]}) == "stop"
    assert ends({"token_ids": [3]}, ignore_eos=True) is None
    assert ends({"token_ids": [3]}, min_tokens=1) is None
    assert ends({"token_ids": [9]}, stop_token_ids_hidden=[9]) == "stop"
    assert ends({"token_ids": [9], "finish_reason": "content_filter"}) == "content_filter"
    assert ends({"token_ids": [9]}, max_tokens=1) == "length"
    assert ends({"token_ids": [3]}, max_tokens=1) == "stop"
    assert ends({"token_ids": [9]}, context_limit=11) == "length"
    assert ends({"token_ids": [9]}, context_limit=12) is None


@virtually
async def test_a_silent_round_shows_signs_of_life() -> None:
    sent: list[Any] = []
    token = {"token_ids": [1]}
    with signs_of_life(sent.append) as send:
        await asyncio.sleep(2.5 * client_stream.SIGN_OF_LIFE_S)
        assert sent == [{"token_ids": [], "index": 0}] * 2
        for _ in range(8):
            send(token)
            await asyncio.sleep(client_stream.SIGN_OF_LIFE_S / 2)
        assert sent[2:] == [token] * 8
    await asyncio.sleep(10 * client_stream.SIGN_OF_LIFE_S)
    assert len(sent) == 10
