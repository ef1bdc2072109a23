"""The form of a worker's KV in its store: what a record holds, and which rank of an engine owns which part of it.

A record is the KV of one page, or the state at one boundary, in one pool of the model. It holds all heads, whatever the
tensor parallelism (TP) of the engine that wrote it, so that workers of different TP can exchange records. Descriptions
of records travel between processes, and a decoder checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Share:
    """The heads of a section that one rank holds.

    Attributes:
        first: the first of them, counted over the whole model.
        count: how many follow each other from there.
        writes: whether this rank writes them; the other ranks that hold the same head only load it.
    """

    first: int
    count: int
    writes: bool


def head_share(heads: int, tp: int, rank: int) -> Share:
    """The heads that `rank` of `tp` ranks holds.

    With fewer heads than ranks, groups of neighbouring ranks hold the same head, as in SGLang
    (`rank // (tp // heads)`). The first rank of a group writes it.

    Raises:
        ValueError: neither of the two numbers divides the other, or there is no such rank.
    """
    if heads < 1 or not 0 <= rank < tp:
        raise ValueError(f"no share of {heads} heads for rank {rank} of {tp}")
    if heads % tp == 0:
        count = heads // tp
        return Share(rank * count, count, True)
    if tp % heads:
        raise ValueError(f"{heads} heads cannot be divided over {tp} ranks")
    group = tp // heads
    return Share(rank // group, 1, rank % group == 0)


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a record in which every head has the same size: [head of the model][layer][bytes].

    Attributes:
        heads: of the whole model.
        layers: of the pool, not of the model.
        head_bytes: of one head in one layer.
    """

    name: str
    heads: Positive
    layers: Positive
    head_bytes: Positive

    @property
    def block_bytes(self) -> int:
        """Bytes of one head over all layers; they are contiguous."""
        return self.layers * self.head_bytes

    @property
    def bytes(self) -> int:
        return self.heads * self.block_bytes


class PoolGeometry(Struct, frozen=True, forbid_unknown_fields=True):
    """The records of one pool.

    Attributes:
        name: as SGLang names the pool: `kv`, `swa` or `mamba`.
        sections: the parts of a record, in order.
        window_pages: 0 if a prefix can be restored only with the record of each of its pages; otherwise, how many
            pages before the end of the prefix need a record.
    """

    name: str
    sections: tuple[Section, ...]
    window_pages: NotNegative = 0

    @property
    def record_bytes(self) -> int:
        return sum(section.bytes for section in self.sections)

    def starts(self) -> dict[str, int]:
        """The byte of a record at which each section starts."""
        starts, at = {}, 0
        for section in self.sections:
            starts[section.name] = at
            at += section.bytes
        return starts


class KvGeometry(Struct, frozen=True, forbid_unknown_fields=True):
    """The records of a worker. Workers exchange KV if this is equal, whatever their TP.

    Attributes:
        fingerprint: of the weights and of the settings that the KV depends on.
        page_size: tokens per page.
    """

    fingerprint: str
    page_size: Positive
    pools: tuple[PoolGeometry, ...]

    @property
    def page_bytes(self) -> int:
        """By how much a long context grows per page: windows and states stay as large as they are."""
        return sum(pool.record_bytes for pool in self.pools if not pool.window_pages)

    @property
    def longest_window_pages(self) -> int:
        """Of all pools of which a prefix needs only the last pages."""
        return max(pool.window_pages for pool in self.pools)

    def pool(self, name: str) -> PoolGeometry:
        """The pool of that name. Raises `KeyError` if there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)


def mismatch(ours: KvGeometry, theirs: KvGeometry) -> str | None:
    """Why two workers cannot exchange KV, in one line; None if they can."""
    if ours.page_size != theirs.page_size:
        return f"page size differs: {ours.page_size} tokens here, {theirs.page_size} there"
    for here, there in zip_longest(ours.pools, theirs.pools):
        if here != there:
            return f"KV pools differ: {here} here, {there} there"
    if ours.fingerprint != theirs.fingerprint:
        return f"weights or settings differ: fingerprint {ours.fingerprint[:16]} here, {theirs.fingerprint[:16]} there"
    return None


PageWindow = tuple[int, Callable[[int], bool]]
"""Of a pool: the pages before the end of a prefix whose records it needs (0: every page), and whether it has one."""


def restorable_lengths(pages: int, attention_windows: Sequence[PageWindow]) -> Iterator[int]:
    """All lengths in pages, up to `pages`, at which every pool has its window; the longest first."""
    length = pages
    there_from = [length] * len(attention_windows)
    while length:
        holes = (_hole(window, there_from, number, length) for number, window in enumerate(attention_windows))
        hole = max(holes, default=-1)
        if hole < 0:
            yield length
        # The hole also lies in the windows of all the lengths between.
        length = hole if hole >= 0 else length - 1
        there_from = [min(start, length) for start in there_from]


def window_start(window_pages: int, length: int) -> int:
    """The first page of the window of a prefix of `length` pages."""
    return max(0, length - (window_pages or length))


def _hole(window: PageWindow, there_from: list[int], number: int, length: int) -> int:
    """The last page without a record in the window of a prefix of `length` pages; -1: the window is complete.

    `there_from`: from this page to `length`, all records are known to be there. It is brought up to date.
    """
    window_pages, has = window
    start = window_start(window_pages, length)
    while there_from[number] > start:
        if not has(there_from[number] - 1):
            return there_from[number] - 1
        there_from[number] -= 1
    return -1


TRIED_PAGE_TOKENS = (16, 32, 64)
"""Page sizes, and below degrees and types of KV, with which real engines have run the KV store.

Others need `--allow-untested`.
"""

TRIED_DEGREES: Mapping[str, tuple[int, ...]] = {
    "MHATokenToKVPool": (1, 2, 4, 8),
    "MLATokenToKVPool": (1, 2, 4),
    "SWAKVPool": (1, 2, 4),
    "HybridLinearKVPool": (1, 2, 4),
}
"""By SGLang's class of the KV pool. `docs/models.md` lists the models and the pairs of degrees."""

_FLOATS = ("torch.float32", "torch.bfloat16")
TRIED_TYPES: Mapping[str, tuple[str, ...]] = {
    "MHATokenToKVPool": (*_FLOATS, "torch.float16", "torch.float8_e4m3fn"),
    "MLATokenToKVPool": (*_FLOATS, "torch.float8_e4m3fn"),
    "SWAKVPool": (*_FLOATS, "torch.float8_e4m3fn"),
    "HybridLinearKVPool": _FLOATS,
}
"""The KV of a pool, also by its class."""

TRIED_STATE_TYPES: tuple[tuple[str, ...], tuple[str, ...]] = (("torch.float32",), _FLOATS)
"""Of the temporal part of a state, and of its convolution."""
