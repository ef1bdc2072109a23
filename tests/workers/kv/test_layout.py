"""Layouts: runs cover exactly the pages asked for, and a descriptor survives its way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.kv.layout import Descriptor, PoolLayout, decode_descriptor, mismatch, runs
from workers.kv.staging import staging_layout

POOL = PoolLayout("model/float32", 16, 100, (64, 32), (10_000, 50_000), "VRAM", 3)
PAGES = st.lists(st.integers(0, 40), unique=True, max_size=40)


@given(st.data())
def test_runs_cover_the_pages_in_order(data: st.DataObject) -> None:
    sources = data.draw(PAGES)
    targets = data.draw(st.permutations(range(len(sources))))
    first, into, lengths = runs(sources, targets)
    pairs = [(a + at, b + at) for a, b, length in zip(first, into, lengths, strict=True) for at in range(length)]
    assert pairs == list(zip(sources, targets, strict=True))
    assert all(length > 0 for length in lengths)


def test_neighbours_on_both_sides_are_one_run() -> None:
    assert runs([5, 6, 7, 9], [0, 1, 2, 3]) == ([5, 9], [0, 3], [3, 1])
    assert runs([5, 6], [1, 0]) == ([5, 6], [1, 0], [1, 1])


def test_blocks_are_addresses_in_every_buffer() -> None:
    assert POOL.blocks([2, 7], [1, 3]).tolist() == [
        [10_000 + 2 * 64, 64, 3],
        [10_000 + 7 * 64, 3 * 64, 3],
        [50_000 + 2 * 32, 32, 3],
        [50_000 + 7 * 32, 3 * 32, 3],
    ]


def test_staging_has_the_same_buffers_one_after_the_other() -> None:
    staging = staging_layout(POOL, 10, 1000)
    assert staging.addresses == (1000, 1000 + 10 * 64)
    assert (staging.memory, staging.device_id, staging.page_bytes) == ("DRAM", 0, POOL.page_bytes)


def test_a_descriptor_survives_its_way() -> None:
    descriptor = Descriptor(POOL, b"\x00agent\xff")
    assert decode_descriptor(descriptor.encode()) == descriptor
    with pytest.raises(ValueError, match="not a KV descriptor"):
        decode_descriptor(b"")
    with pytest.raises(ValueError, match=r".+"):
        decode_descriptor(b"\x05\x00\x00\x00hello")
    nested = b"[" * 100_000
    with pytest.raises(ValueError, match="not a KV descriptor"):
        decode_descriptor(len(nested).to_bytes(4, "little") + nested)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=80) | st.binary(max_size=80).map(lambda data: len(data).to_bytes(4, "little") + data))
def test_any_bytes_are_a_descriptor_or_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a KV descriptor"):
        decode_descriptor(data)


def test_what_differs_is_named() -> None:
    elsewhere = replace(POOL, addresses=(1, 2), pages=7, memory="DRAM")
    assert mismatch(POOL, elsewhere) is None
    assert "fingerprint" in str(mismatch(POOL, replace(POOL, fingerprint="other")))
    assert "page_size" in str(mismatch(POOL, replace(POOL, page_size=1)))
    assert "page_bytes" in str(mismatch(POOL, replace(POOL, page_bytes=(64, 64))))
