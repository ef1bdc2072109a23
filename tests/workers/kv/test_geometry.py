"""Records of the store: who holds which heads, what makes two workers different, which prefixes can be restored."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import ValidationError, json, to_builtins
from msgspec.structs import replace

from workers.kv.shared import KvGeometry, PoolGeometry, Section, head_share, mismatch, restorable_lengths

TP = st.sampled_from((1, 2, 4, 8))
EACH_CASE = pytest.mark.parametrize(("heads", "tp"), [(heads, tp) for heads in range(1, 17) for tp in (1, 2, 4, 8)])
"""Few of them have fewer heads than ranks. Drawn cases would leave those out now and then."""


def divides(heads: int, tp: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


@EACH_CASE
def test_every_head_is_written_by_exactly_one_rank(heads: int, tp: int) -> None:
    if not divides(heads, tp):
        with pytest.raises(ValueError, match=f"{heads} heads cannot be divided over {tp} ranks"):
            head_share(heads, tp, 0)
        return
    shares = [head_share(heads, tp, rank) for rank in range(tp)]
    written = [head for share in shares if share.writes for head in range(share.first, share.first + share.count)]
    assert written == list(range(heads))


@EACH_CASE
def test_every_rank_holds_the_heads_that_sglang_gives_it(heads: int, tp: int) -> None:
    if not divides(heads, tp):
        return
    for rank in range(tp):
        share = head_share(heads, tp, rank)
        assert share.count == max(1, heads // tp)
        # SGLang's QKVParallelLinear: replicas of a KV head lie on neighbouring ranks.
        replicas = max(1, tp // heads)
        assert share.first == rank // replicas * share.count
        assert share.first + share.count <= heads


def test_a_share_of_nothing_is_refused() -> None:
    for heads, tp, rank in ((0, 1, 0), (2, 2, 2), (2, 2, -1), (2, 0, 0)):
        with pytest.raises(ValueError, match="no share of"):
            head_share(heads, tp, rank)


KV = PoolGeometry("kv", (Section("kv", 4, 3, 64),))
MAMBA = PoolGeometry("mamba", (Section("temporal", 4, 2, 32), Section("conv_q", 2, 2, 8)), window_pages=1)
GEOMETRY = KvGeometry("f" * 64, 16, (KV, MAMBA))


def test_a_record_is_its_blocks_one_after_the_other() -> None:
    assert KV.record_bytes == 4 * 3 * 64
    assert MAMBA.record_bytes == 4 * 64 + 2 * 16
    assert MAMBA.starts() == {"temporal": 0, "conv_q": 256}
    assert GEOMETRY.pool("mamba") is MAMBA
    with pytest.raises(KeyError):
        GEOMETRY.pool("swa")


SECTIONS = st.builds(Section, st.text(), st.integers(1, 64), st.integers(1, 99), st.integers(1, 2**40))
POOLS = st.builds(PoolGeometry, st.text(), st.lists(SECTIONS, max_size=4).map(tuple), st.integers(0, 99))
GEOMETRIES = st.builds(KvGeometry, st.text(), st.integers(1, 512), st.lists(POOLS, max_size=3).map(tuple))


@given(GEOMETRIES)
def test_a_decoder_returns_the_same_geometry(geometry: KvGeometry) -> None:
    assert json.decode(json.encode(geometry), type=KvGeometry) == geometry


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 0},
        {"page_size": True},
        {"page_size": "16"},
        {"fingerprint": 3},
        {"pools": 3},
        {"pools": [3]},
        {"pools": [{"name": "kv"}]},
        {"pools": [{"name": "kv", "sections": [{"name": "kv"}], "window_pages": 0}]},
        {"pools": [{"name": "kv", "sections": [], "window_pages": -1}]},
        {"more": 1},
    ],
)
def test_anything_else_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        json.decode(json.encode({**to_builtins(GEOMETRY), **change}), type=KvGeometry)


def of_kv(**change: Any) -> KvGeometry:
    return replace(GEOMETRY, pools=(replace(KV, sections=(replace(KV.sections[0], **change),)), MAMBA))


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (GEOMETRY, None),
        (replace(GEOMETRY, page_size=64), "page size differs: 16 tokens here, 64 there"),
        (replace(GEOMETRY, pools=(KV,)), f"KV pools differ: {MAMBA} here, None there"),
        (of_kv(heads=8), f"KV pools differ: {KV} here, {of_kv(heads=8).pools[0]} there"),
        (
            replace(GEOMETRY, pools=(KV, replace(MAMBA, window_pages=2))),
            f"KV pools differ: {MAMBA} here, {replace(MAMBA, window_pages=2)} there",
        ),
        (
            replace(GEOMETRY, fingerprint="e" * 64),
            "weights or settings differ: fingerprint ffffffffffffffff here, eeeeeeeeeeeeeeee there",
        ),
    ],
)
def test_the_difference_is_named_in_one_line(theirs: KvGeometry, text: str | None) -> None:
    assert mismatch(GEOMETRY, theirs) == text


def test_windows_and_states_are_no_part_of_what_a_context_grows_by() -> None:
    assert GEOMETRY.page_bytes == KV.record_bytes
    assert (
        replace(GEOMETRY, pools=(KV, replace(MAMBA, window_pages=0))).page_bytes == KV.record_bytes + MAMBA.record_bytes
    )


PAGES = 12


@given(
    st.integers(0, PAGES), st.lists(st.tuples(st.integers(0, PAGES), st.sets(st.integers(0, PAGES - 1))), max_size=3)
)
def test_a_length_is_restorable_if_every_pool_has_its_window_before_it(
    pages: int, pools: list[tuple[int, set[int]]]
) -> None:
    def is_restorable(length: int) -> bool:
        return all(set(range(max(0, length - (window or length)), length)) <= there for window, there in pools)

    lengths = list(restorable_lengths(pages, [(window, there.__contains__) for window, there in pools]))
    assert lengths == [length for length in range(pages, 0, -1) if is_restorable(length)]
