"""The allocator of records: no overlap, nothing is lost, and any size after any other."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from workers.kv.store.records import RecordAllocator, aligned_bytes


def test_records_that_are_allocated_together_are_neighbours() -> None:
    allocator = RecordAllocator(1 << 20, [4096])
    first = allocator.allocate(4096, 10)
    assert first == list(range(0, 40960, 4096))
    hole = first[2:4]
    allocator.free(hole)
    assert allocator.allocate(4096, 3) == [40960, 45056, 49152]
    assert allocator.allocate(4096, 2) == hole


def test_a_request_takes_several_stretches_when_none_is_long_enough() -> None:
    allocator = RecordAllocator(10 * 64, [64])
    offsets = allocator.allocate(64, 10)
    allocator.free(offsets[1:3] + offsets[5:9])
    assert allocator.available(64) == 6
    assert sorted(allocator.allocate(64, 6)) == offsets[1:3] + offsets[5:9]
    with pytest.raises(MemoryError, match="no room for 1 records of 64 bytes"):
        allocator.allocate(64, 1)


def test_nothing_is_taken_when_there_is_too_little() -> None:
    allocator = RecordAllocator(10 * 64, [64])
    with pytest.raises(MemoryError):
        allocator.allocate(64, 11)
    assert allocator.available(64) == 10


def test_a_free_slab_serves_another_size() -> None:
    allocator = RecordAllocator(4 * 1024, [64, 1024])
    small = allocator.allocate(64, 4096 // 64)
    assert allocator.available(1024) == 0
    allocator.free(small[1:])
    assert allocator.fits({1024: 3, 64: 15})
    assert not allocator.fits({1024: 3, 64: 16})
    assert len(allocator.allocate(1024, 3)) == 3
    allocator.free(small[:1])
    assert allocator.available(1024) == 1


def test_a_record_is_given_back_once() -> None:
    allocator = RecordAllocator(4096, [64, 512])
    offsets = allocator.allocate(64, 3)
    allocator.free(offsets[:1])
    with pytest.raises(ValueError, match="given back twice"):
        allocator.free(offsets[:1])
    with pytest.raises(ValueError, match="no record is in use at offset"):
        allocator.free([offsets[1] + 1])
    with pytest.raises(ValueError, match="no record is in use at offset"):
        allocator.free([1 << 40])
    allocator.free(offsets[1:])
    with pytest.raises(ValueError, match="no record is in use at offset"):
        allocator.free(offsets[1:])


def test_a_store_smaller_than_a_record_is_an_error() -> None:
    with pytest.raises(ValueError, match="a KV store of 100 bytes is smaller than one record of 128 bytes"):
        RecordAllocator(100, [65])
    with pytest.raises(ValueError, match="above 0 bytes"):
        RecordAllocator(100, [0])


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of calls, with records of up to three sizes."""

    @initialize(sizes=st.lists(st.integers(1, 700), min_size=1, max_size=3), size_bytes=st.integers(704, 20_000))
    def start(self, sizes: list[int], size_bytes: int) -> None:
        self.sizes = sizes
        self.size_bytes = size_bytes
        self.allocator = RecordAllocator(size_bytes, sizes)
        self.in_use: dict[int, int] = {}

    @rule(size=st.integers(0, 2), count=st.integers(1, 40))
    def allocate(self, size: int, count: int) -> None:
        record_bytes = self.sizes[size % len(self.sizes)]
        available = self.allocator.available(record_bytes)
        assert self.allocator.fits({record_bytes: count}) == (count <= available)
        if count > available:
            with pytest.raises(MemoryError):
                self.allocator.allocate(record_bytes, count)
            return
        self.take(record_bytes, count)

    @rule(counts=st.lists(st.integers(0, 20), min_size=3, max_size=3))
    def allocate_together(self, counts: list[int]) -> None:
        wanted: dict[int, int] = {}
        for record_bytes, count in zip(self.sizes, counts, strict=False):
            wanted[record_bytes] = wanted.get(record_bytes, 0) + count
        if self.allocator.fits(wanted):
            for record_bytes, count in wanted.items():
                self.take(record_bytes, count)

    def take(self, record_bytes: int, count: int) -> None:
        offsets = self.allocator.allocate(record_bytes, count)
        assert len(offsets) == count
        for offset in offsets:
            assert offset not in self.in_use
            self.in_use[offset] = aligned_bytes(record_bytes)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.in_use:
            offsets = data.draw(st.lists(st.sampled_from(sorted(self.in_use)), unique=True, max_size=30))
            self.allocator.free(offsets)
            for offset in offsets:
                del self.in_use[offset]

    @rule()
    def free_all(self) -> None:
        self.allocator.free(list(self.in_use))
        self.in_use.clear()
        for record_bytes in self.sizes:
            slab_bytes, slabs = self.allocator.slab_bytes, self.allocator.slabs
            assert self.allocator.available(record_bytes) == slabs * (slab_bytes // aligned_bytes(record_bytes))

    @invariant()
    def records_do_not_overlap(self) -> None:
        end = 0
        for offset, length in sorted(self.in_use.items()):
            assert offset >= end
            end = offset + length
        assert end <= self.size_bytes

    @invariant()
    def bytes_are_counted(self) -> None:
        assert self.allocator.used_bytes == sum(self.in_use.values())


TestAllocatorMachine = pytest.mark.slow(AllocatorMachine.TestCase)
TestAllocatorMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
