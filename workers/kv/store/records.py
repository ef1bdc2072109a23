"""Where records lie in the store: an allocator of byte offsets for records of a few sizes."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

_ALIGNMENT_BYTES = 64
"""Every record starts at a multiple of this, so that its bytes can be viewed as any dtype."""
_CHUNKS = 64
"""A store has at least this many slabs, if its records allow it."""
_CHUNK_BYTES = 64 << 20
_CHUNK_RECORDS = 16
"""A slab has at most this many bytes, or this many of the largest records if they take more."""
_CHUNK_SIZES_TRIED = 32


def aligned_bytes(record_bytes: int) -> int:
    """Bytes that a record takes in the store."""
    return -(-record_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def slab_bytes_for(size_bytes: int, record_sizes: Sequence[int]) -> int:
    """Bytes per slab: small enough that another size soon gets a slab, large enough for many records in a row.

    Of the sizes that fulfil both, it is the size at which the ends of the slabs waste least. If all records have one
    size, there is only one slab, because no other size competes for the memory.
    """
    largest = max(record_sizes)
    if len(record_sizes) == 1:
        return size_bytes // largest * largest
    most = max(1, min(size_bytes // _CHUNKS, max(_CHUNK_BYTES, _CHUNK_RECORDS * largest)) // largest)
    step = -(-most // _CHUNK_SIZES_TRIED)
    sizes = [multiple * largest for multiple in range(most, most // 2, -step)]
    return min(sizes, key=lambda slab: sum(slab % record_bytes for record_bytes in record_sizes) / slab)


class _SizeClass:
    """The slabs that serve one size of record now, and their free slots.

    Free slots are kept as extents within a slab. A slot's number is slab * slots per slab + slot within the slab.
    Extents lie in buckets by the bit length of their length, so that a fitting extent is found without a search.
    """

    def __init__(self, record_bytes: int, slots_per_slab: int) -> None:
        self.record_bytes = record_bytes
        self.slots_per_slab = slots_per_slab
        self.free_slots = 0
        self._lengths: dict[int, int] = {}
        self._starts_by_end: dict[int, int] = {}
        # Ordered, because the first entry of a plain dictionary is slow to find after deletions at its beginning.
        self._buckets = [OrderedDict[int, None]() for _ in range(slots_per_slab.bit_length() + 1)]
        self._used: dict[int, bytearray] = {}

    def add_slab(self, slab: int) -> None:
        self._used[slab] = bytearray(self.slots_per_slab)
        self._add_extent(slab * self.slots_per_slab, self.slots_per_slab)

    def fitting_extent(self, slots: int) -> int | None:
        """The start of a free extent of at least this length, if one is found at once."""
        width = slots.bit_length()
        start = next(iter(self._buckets[width]), None) if width < len(self._buckets) else None
        if start is not None and self._lengths[start] >= slots:
            return start
        return next((next(iter(bucket)) for bucket in self._buckets[width + 1 :] if bucket), None)

    def longest_extent(self) -> int | None:
        """The start of one of the longest free extents (up to a factor of two); None if nothing is free."""
        return next((next(iter(bucket)) for bucket in reversed(self._buckets) if bucket), None)

    def take(self, start: int, slots: int) -> range:
        """Take up to `slots` slots from the beginning of a free extent."""
        length = self._remove_extent(start)
        taken = min(slots, length)
        if taken < length:
            self._add_extent(start + taken, length - taken)
        slab, at = divmod(start, self.slots_per_slab)
        self._used[slab][at : at + taken] = b"\1" * taken
        return range(start, start + taken)

    def give_back(self, start: int, slots: int) -> bool:
        """Free neighbouring slots of one slab; returns whether the whole slab is free and has left this class."""
        slab, at = divmod(start, self.slots_per_slab)
        used = self._used[slab]
        if used.count(1, at, at + slots) != slots:
            raise ValueError("a record is given back twice")
        used[at : at + slots] = bytes(slots)
        end = start + slots
        if at and (before := self._starts_by_end.get(start)) is not None:
            self._remove_extent(before)
            start = before
        if end % self.slots_per_slab and end in self._lengths:
            end += self._remove_extent(end)
        if end - start == self.slots_per_slab:
            del self._used[slab]
            return True
        self._add_extent(start, end - start)
        return False

    def used_slots(self, slab: int) -> int:
        """How many records of a slab are in use."""
        return self._used[slab].count(1)

    def _add_extent(self, start: int, slots: int) -> None:
        self._lengths[start] = slots
        self._starts_by_end[start + slots] = start
        self._buckets[slots.bit_length()][start] = None
        self.free_slots += slots

    def _remove_extent(self, start: int) -> int:
        slots = self._lengths.pop(start)
        del self._starts_by_end[start + slots]
        del self._buckets[slots.bit_length()][start]
        self.free_slots -= slots
        return slots


class RecordAllocator:
    """Byte offsets of records in a store, for records of a few sizes.

    The store is divided into slabs. A slab serves one size while any of its records is in use, and any size after.
    Records that are allocated together are neighbours where possible, because a transfer joins neighbours to one block.
    The cost of a call is a constant per record and per run of neighbours. It does not depend on how many records the
    store has.

    Args:
        size_bytes: of the store.
        record_sizes: bytes of the records that will be asked for.

    Raises:
        ValueError: a record does not fit into the store, or has no bytes.
    """

    def __init__(self, size_bytes: int, record_sizes: Sequence[int]) -> None:
        sizes = sorted({aligned_bytes(record_bytes) for record_bytes in record_sizes})
        if not sizes or min(record_sizes) <= 0:
            raise ValueError(f"records need a size above 0 bytes, not {list(record_sizes)}")
        if sizes[-1] > size_bytes:
            raise ValueError(f"a KV store of {size_bytes} bytes is smaller than one record of {sizes[-1]} bytes")
        self.slab_bytes = slab_bytes_for(size_bytes, sizes)
        self.slabs = size_bytes // self.slab_bytes
        self.used_bytes = 0
        self._classes = {size: _SizeClass(size, self.slab_bytes // size) for size in sizes}
        self._free_slabs = list(range(self.slabs))
        self._class_of_slab: list[_SizeClass | None] = [None] * self.slabs

    @property
    def free_bytes(self) -> int:
        """Bytes that no record uses. Records of one size may be unable to use all of them."""
        return self.slabs * self.slab_bytes - self.used_bytes

    def available(self, record_bytes: int) -> int:
        """How many records of a size could be allocated now."""
        wanted = self._classes[aligned_bytes(record_bytes)]
        return wanted.free_slots + len(self._free_slabs) * wanted.slots_per_slab

    def free_slots(self, record_bytes: int) -> int:
        """How many records of a size could be allocated without another slab."""
        return self._classes[aligned_bytes(record_bytes)].free_slots

    def fits(self, counts: Mapping[int, int], without: Iterable[int] = ()) -> bool:
        """Whether all of `counts` (record bytes -> number) could be allocated together.

        Args:
            without: offsets of records that would be given back before.
        """
        free_slots = {size: of_size.free_slots for size, of_size in self._classes.items()}
        free_slabs = len(self._free_slabs)
        for slab, freed in Counter(offset // self.slab_bytes for offset in without).items():
            owner = self._class_of_slab[slab]
            assert owner is not None, "a record is in use in each of these slabs"
            used = owner.used_slots(slab)
            if freed < used:
                free_slots[owner.record_bytes] += freed
            else:
                free_slots[owner.record_bytes] -= owner.slots_per_slab - used
                free_slabs += 1
        for size, count in self._by_class(counts).items():
            free_slabs -= -(-max(0, count - free_slots[size]) // self._classes[size].slots_per_slab)
        return free_slabs >= 0

    def allocate(self, record_bytes: int, count: int) -> list[int]:
        """Offsets of `count` records.

        Raises:
            MemoryError: there is no room for all of them. Nothing is taken.
        """
        if self.available(record_bytes) < count:
            raise MemoryError(f"no room for {count} records of {record_bytes} bytes")
        wanted = self._classes[aligned_bytes(record_bytes)]
        offsets: list[int] = []
        while len(offsets) < count:
            left = count - len(offsets)
            slots = wanted.take(self._extent(wanted, left), left)
            slab, at = divmod(slots.start, wanted.slots_per_slab)
            first = slab * self.slab_bytes + at * wanted.record_bytes
            offsets.extend(range(first, first + len(slots) * wanted.record_bytes, wanted.record_bytes))
        self.used_bytes += count * wanted.record_bytes
        return offsets

    def free(self, offsets: Sequence[int]) -> None:
        """Give records back.

        Raises:
            ValueError: a record is not in use, or there is no record at this offset.
        """
        for first, count in self._neighbours(offsets):
            slab, at = divmod(first, self.slab_bytes)
            owner = self._class_of_slab[slab] if 0 <= slab < self.slabs else None
            if owner is None or at % owner.record_bytes:
                raise ValueError(f"no record is in use at offset {first}")
            slot = slab * owner.slots_per_slab + at // owner.record_bytes
            if owner.give_back(slot, count):
                self._class_of_slab[slab] = None
                heapq.heappush(self._free_slabs, slab)
            self.used_bytes -= count * owner.record_bytes

    def _extent(self, wanted: _SizeClass, slots: int) -> int:
        """A free extent to take slots from: a fitting one, else a new slab, else one of the longest.

        A new slab is only taken if the slots do not suffice without one, because another size may need it (`fits`).
        """
        start = wanted.fitting_extent(slots)
        if start is not None:
            return start
        if wanted.free_slots < slots:
            slab = heapq.heappop(self._free_slabs)
            self._class_of_slab[slab] = wanted
            wanted.add_slab(slab)
            return slab * wanted.slots_per_slab
        longest = wanted.longest_extent()
        assert longest is not None, "the caller has checked that there is room"
        return longest

    def _neighbours(self, offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Ascending offsets as (first offset, number of neighbouring records in one slab)."""
        ordered = sorted(offsets)
        at = 0
        while at < len(ordered):
            first, slab = ordered[at], ordered[at] // self.slab_bytes
            owner = self._class_of_slab[slab] if 0 <= slab < self.slabs else None
            step, end, count = owner.record_bytes if owner else 0, (slab + 1) * self.slab_bytes, 1
            while at + count < len(ordered) and ordered[at + count] == first + count * step < end:
                count += 1
            yield first, count
            at += count

    @staticmethod
    def _by_class(counts: Mapping[int, int]) -> dict[int, int]:
        by_class: dict[int, int] = {}
        for record_bytes, count in counts.items():
            size = aligned_bytes(record_bytes)
            by_class[size] = by_class.get(size, 0) + count
        return by_class
