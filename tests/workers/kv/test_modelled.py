"""The modelled exchange: whatever a peer answers, a fetch ends with a result."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.keys import page_keys
from ampd.types import Parallelism
from ampd.wire import KvReply, KvRequest
from tests.workers.engines.modelled_lab import Times
from workers.kv.exchange import KvExchange, KvFetch
from workers.kv.modelled import ModelledStore, ModelledTransport
from workers.kv.peer_reads import Descriptor, encode_descriptor
from workers.kv.shared import KvGeometry, PoolGeometry, Section

PAGE = 16
KEYS = page_keys(range(4 * PAGE), PAGE, tenant="")


class OneAnswer:
    """A peer that gives the same answer to every call."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def call(self, _worker_id: str, _request: KvRequest, _timeout_s: float) -> KvReply:
        return cast(KvReply, self._answer)


GEOMETRY = KvGeometry("ours", PAGE, (PoolGeometry("kv", (Section("kv", 1, 1, 8 * PAGE),)),))


def exchange(times: Times | None = None, fingerprint: str = "ours") -> KvExchange[ModelledStore]:
    transport = ModelledTransport(times or Times(), Parallelism(), 8)
    return KvExchange(ModelledStore(PAGE, 10_000, 8, fingerprint), lambda _address, _bytes: transport)


async def connected(answer: object, times: Times | None = None) -> KvExchange[ModelledStore]:
    made = exchange(times)
    await made.open(0.0)
    made.connect(OneAnswer(answer), lambda _session_id, _tokens: None)
    return made


def fetched(answer: object) -> KvFetch:
    async def fetch() -> KvFetch:
        return await (await connected(answer)).fetch("r", KEYS, 0, "P", 5.0)

    return asyncio.run(fetch())


def lease(**changed: Any) -> dict[str, Any]:
    descriptor = encode_descriptor(Descriptor(GEOMETRY, 0, 10_000, b"1"))
    records = {"kv": ([0, 1, 2, 3], [0, 128, 256, 384])}
    return {"lease_id": "1", "matched": 4, "records": records, "descriptor": descriptor, **changed}


def test_a_proper_answer_is_read() -> None:
    assert fetched(lease()).tokens == 4 * PAGE
    assert fetched(lease(records={"kv": ([0, 1], [0, 128])})).tokens == 2 * PAGE


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
    assert fetched(lease(descriptor=b"\x91" * 100_000)).error


def test_a_worker_that_tells_no_degree_is_an_error() -> None:
    assert fetched(lease(descriptor=encode_descriptor(Descriptor(GEOMETRY, 0, 10_000, b"agent")))).error


def test_a_worker_with_another_fingerprint_is_not_read() -> None:
    theirs = exchange(fingerprint="theirs")

    async def reads() -> list[KvFetch]:
        keys = [bytes([number]) * 32 for number in range(4)]
        await theirs.open(0.0)
        theirs.store.write("s", keys)
        ours = await connected(await theirs.serve({"op": "lease", "keys": keys, "ttl_s": 5.0}))
        return [await ours.fetch("r", KEYS, 0, "P", 5.0) for _ in range(2)]

    results = asyncio.run(reads())
    assert [result.tokens for result in results] == [0, 0]
    assert all(
        "weights or settings differ: fingerprint ours here, theirs there" in str(result.error) for result in results
    )


class SlowReads(Times):
    """A read of no pages takes no time."""

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:
        super().kv_transfer_s(tokens, source, target)
        return 0.05 if tokens else 0.0


def test_a_read_waits_for_the_pages_that_another_read_brings() -> None:
    async def matched_after_the_second() -> int:
        made = await connected(lease(), SlowReads())
        first = asyncio.create_task(made.fetch("r", KEYS, 0, "P", 60.0))
        await asyncio.sleep(0)
        await made.fetch("r2", KEYS, 0, "P", 60.0)
        matched = made.store.directory.match(KEYS)
        assert (await first).tokens == 4 * PAGE
        return matched

    assert asyncio.run(matched_after_the_second()) == 4


def test_what_another_read_fails_to_bring_is_read_again() -> None:
    async def tokens_after_the_first_is_cancelled() -> int:
        made = await connected(lease(), SlowReads())
        first = asyncio.create_task(made.fetch("r", KEYS, 0, "P", 60.0))
        await asyncio.sleep(0)
        second = asyncio.create_task(made.fetch("r2", KEYS, 0, "P", 60.0))
        await asyncio.sleep(0)
        first.cancel()
        return (await second).tokens

    assert asyncio.run(tokens_after_the_first_is_cancelled()) == 4 * PAGE
