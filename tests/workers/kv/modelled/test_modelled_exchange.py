"""The modelled exchange: whatever a peer answers, a fetch ends with a result."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.page_keys import page_keys
from ampd.types import Parallelism
from ampd.wire import KvReply, KvRequest
from tests.workers.engines.modelled_lab import Times
from workers.kv.exchange import KvFetch
from workers.kv.modelled.modelled_exchange import ModelledExchange

PAGE = 16
KEYS = page_keys(range(4 * PAGE), PAGE, tenant="")


class OneAnswer:
    """A peer that gives the same answer to every call."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def call(self, _worker_id: str, _request: KvRequest, _timeout_s: float) -> KvReply:
        return cast(KvReply, self._answer)


def exchange(fingerprint: str = "ours") -> ModelledExchange:
    return ModelledExchange(Times(), Parallelism(), PAGE, 10_000, 8, fingerprint)


def fetched(answer: object) -> KvFetch:
    made = exchange()
    made.connect(OneAnswer(answer), lambda _session_id, _tokens: None)
    return asyncio.run(made.fetch("r", KEYS, 0, "P", 5.0))


def lease(**changed: Any) -> dict[str, Any]:
    descriptor = json.dumps({"tp": 1, "fingerprint": "ours"}).encode()
    return {"lease_id": "1", "matched": 4, "descriptor": descriptor, **changed}


def test_a_proper_answer_is_read() -> None:
    assert fetched(lease()).tokens == 4 * PAGE
    assert fetched(lease(matched=100)).tokens == 4 * PAGE


_VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(lease())), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(_VALUES | st.fixed_dictionaries({}, optional=dict.fromkeys(lease(), _VALUES)).map(lambda new: lease(**new)))
def test_a_malformed_answer_is_an_error_and_no_exception(answer: object) -> None:
    result = fetched(answer)
    assert result.error is None or isinstance(result.error, str)


def test_a_nested_descriptor_is_an_error() -> None:
    assert fetched(lease(descriptor=b"[" * 100_000)).error


def test_a_worker_with_another_fingerprint_is_not_read_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = exchange(), exchange("theirs")

    async def reads() -> list[KvFetch]:
        keys = [bytes([number]) * 32 for number in range(4)]
        theirs.write("s", keys)
        reply = await theirs.serve({"op": "lease", "keys": keys, "ttl_s": 5.0})
        ours.connect(OneAnswer(reply), lambda _session_id, _tokens: None)
        return [await ours.fetch("r", KEYS, 0, "P", 5.0) for _ in range(2)]

    results = asyncio.run(reads())
    assert [result.tokens for result in results] == [0, 0]
    assert all("fingerprint differs: ours here, theirs there" in str(result.error) for result in results)
    assert len([line for line in caplog.messages if line.startswith("worker P has another kind of KV")]) == 1


class SlowReads(Times):
    """A read of no pages takes no time."""

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:
        super().kv_transfer_s(tokens, source, target)
        return 0.05 if tokens else 0.0


def test_a_read_waits_for_the_pages_that_another_read_brings() -> None:
    made = ModelledExchange(SlowReads(), Parallelism(), PAGE, 10_000, 8, "ours")
    made.connect(OneAnswer(lease()), lambda _session_id, _tokens: None)

    async def matched_after_the_second() -> int:
        first = asyncio.create_task(made.fetch("r", KEYS, 0, "P", 60.0))
        await asyncio.sleep(0)
        await made.fetch("r2", KEYS, 0, "P", 60.0)
        matched = made.directory.match(KEYS)
        assert (await first).tokens == 4 * PAGE
        return matched

    assert asyncio.run(matched_after_the_second()) == 4


def test_what_another_read_fails_to_bring_is_read_again() -> None:
    made = ModelledExchange(SlowReads(), Parallelism(), PAGE, 10_000, 8, "ours")
    made.connect(OneAnswer(lease()), lambda _session_id, _tokens: None)

    async def tokens_after_the_first_is_cancelled() -> int:
        first = asyncio.create_task(made.fetch("r", KEYS, 0, "P", 60.0))
        await asyncio.sleep(0)
        second = asyncio.create_task(made.fetch("r2", KEYS, 0, "P", 60.0))
        await asyncio.sleep(0)
        first.cancel()
        return (await second).tokens

    assert asyncio.run(tokens_after_the_first_is_cancelled()) == 4 * PAGE
