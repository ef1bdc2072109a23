"""Checksums of records: whether what was read or stored is what its writer wrote."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

Checksum = int
"""XXH3 of a whole record, without its highest bit, so that every encoding of a message has room for it."""

_BITS = (1 << 63) - 1


def checksum_of(record: memoryview) -> Checksum:
    """The checksum of a record. Other threads run meanwhile."""
    return xxh3_64_intdigest(record) & _BITS


def checksums_at(memory: memoryview, offsets: Sequence[int], record_bytes: int) -> list[Checksum]:
    """Of the records at `offsets`, which all have as many bytes."""
    return [checksum_of(memory[offset : offset + record_bytes]) for offset in offsets]
