"""The form of a worker's KV in its store: what a record holds, and which rank of an engine owns which part of it.

A record is the KV of one page, or the state at one boundary, in one pool of the model. It holds all heads, whatever the
tensor parallelism (TP) of the engine that wrote it, so that workers of different TP can exchange records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


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


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a record in which every head has the same size: [head of the model][layer][bytes].

    Attributes:
        heads: of the whole model.
        layers: of the pool, not of the model.
        head_bytes: of one head in one layer.
    """

    name: str
    heads: int
    layers: int
    head_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one head over all layers; they are contiguous."""
        return self.layers * self.head_bytes

    @property
    def bytes(self) -> int:
        return self.heads * self.block_bytes


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The records of one pool.

    Attributes:
        name: as SGLang names the pool: `kv`, `swa` or `mamba`.
        sections: the parts of a record, in order.
        window_pages: 0 if a prefix can be restored only with the record of each of its pages; otherwise, how many
            pages before the end of the prefix need a record.
    """

    name: str
    sections: tuple[Section, ...]
    window_pages: int = 0

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


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The records of a worker. Workers exchange KV if this is equal, whatever their TP.

    Attributes:
        fingerprint: of the weights and of the settings that the KV depends on.
        page_size: tokens per page.
    """

    fingerprint: str
    page_size: int
    pools: tuple[PoolGeometry, ...]

    @property
    def page_bytes(self) -> int:
        """By how much a long context grows per page: windows and states stay as large as they are."""
        return sum(pool.record_bytes for pool in self.pools if not pool.window_pages)

    def pool(self, name: str) -> PoolGeometry:
        """The pool of that name. Raises `KeyError` if there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """As `from_json` takes it."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Any) -> KvGeometry:
        """The inverse of `to_json`. Raises `ValueError` for anything else."""
        pools = tuple(_pool(pool) for pool in _list(_fields(cls, fields)["pools"]))
        return cls(_text(fields["fingerprint"]), _count(fields["page_size"], 1), pools)


def mismatch(ours: KvGeometry, theirs: KvGeometry) -> str | None:
    """Why two workers cannot exchange KV, in one line; None if they can."""
    if ours.page_size != theirs.page_size:
        return f"page size differs: {ours.page_size} tokens here, {theirs.page_size} there"
    here, there = ([pool.name for pool in geometry.pools] for geometry in (ours, theirs))
    if here != there:
        return f"KV pools differ: {', '.join(here)} here, {', '.join(there)} there"
    for mine, other in zip(ours.pools, theirs.pools, strict=True):
        if reason := _pool_mismatch(mine, other):
            return f"KV pool {mine.name}: {reason}"
    if ours.fingerprint != theirs.fingerprint:
        return f"weights or settings differ: fingerprint {ours.fingerprint[:16]} here, {theirs.fingerprint[:16]} there"
    return None


def _pool_mismatch(ours: PoolGeometry, theirs: PoolGeometry) -> str | None:
    if ours.window_pages != theirs.window_pages:
        return f"window differs: {ours.window_pages} pages here, {theirs.window_pages} there"
    here, there = ([section.name for section in pool.sections] for pool in (ours, theirs))
    if here != there:
        return f"sections differ: {', '.join(here)} here, {', '.join(there)} there"
    for mine, other in zip(ours.sections, theirs.sections, strict=True):
        for name, unit in (("heads", "heads"), ("layers", "layers"), ("head_bytes", "bytes per head and layer")):
            if getattr(mine, name) != getattr(other, name):
                return f"section {mine.name} has {getattr(mine, name)} {unit} here, {getattr(other, name)} there"
    return None


def _pool(fields: Any) -> PoolGeometry:
    _fields(PoolGeometry, fields)
    sections = tuple(_section(section) for section in _list(fields["sections"]))
    return PoolGeometry(_text(fields["name"]), sections, _count(fields["window_pages"], 0))


def _section(fields: Any) -> Section:
    _fields(Section, fields)
    return Section(_text(fields["name"]), *(_count(fields[name], 1) for name in ("heads", "layers", "head_bytes")))


def _fields(kind: type, fields: Any) -> Mapping[str, Any]:
    names = set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if not isinstance(fields, dict) or set(fields) != names:
        raise ValueError(f"not a {kind.__name__}: expected an object with {', '.join(sorted(names))}")
    return fields


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list in a KV geometry, got {type(value).__name__}")
    return list(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a string in a KV geometry, got {type(value).__name__}")
    return value


def _count(value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"expected a whole number of at least {least} in a KV geometry, got {value!r:.40}")
    return value
