"""Staging memory: no page is given out twice, and two processes see the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.kv.staging import PageAllocator, StagingMemory


@given(st.integers(0, 30), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_pages_have_one_owner(pages: int, steps: list[tuple[bool, int]]) -> None:
    allocator = PageAllocator(pages)
    owned: list[list[int]] = []
    for take, size in steps:
        if take:
            free = pages - sum(map(len, owned))
            taken = allocator.allocate(size)
            assert len(taken) == min(size, free)
            owned.append(taken)
        elif owned:
            allocator.free(owned.pop(size % len(owned)))
        everything = [page for one in owned for page in one]
        assert len(everything) == len(set(everything))
        assert set(everything) <= set(range(pages))
        assert allocator.free_pages == pages - len(everything)
    for one in owned:
        allocator.free(one)
    assert allocator.allocate(pages) == list(range(pages))


def test_what_fits_in_one_piece_comes_in_one_piece() -> None:
    allocator = PageAllocator(20)
    first, second, _third = allocator.allocate(5), allocator.allocate(5), allocator.allocate(5)
    allocator.free(second)
    assert allocator.allocate(4) == [5, 6, 7, 8]
    allocator.free(first)
    assert allocator.allocate(5) == [0, 1, 2, 3, 4]


def test_a_page_is_not_given_back_twice() -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(4)
    allocator.free(pages[:2])
    with pytest.raises(ValueError, match="free already"):
        allocator.free([pages[0]])
    with pytest.raises(ValueError, match="twice"):
        allocator.free([pages[2], pages[2]])


def test_another_process_sees_the_same_bytes() -> None:
    memory = StagingMemory.create(8192)
    try:
        memory.map[:5] = b"hello"
        process_id, fd = memory.place
        assert process_id == os.getpid()
        script = (
            "from workers.kv.staging import StagingMemory\n"
            f"memory = StagingMemory.open({process_id}, {fd}, 8192)\n"
            "assert memory.map[:5] == b'hello'\n"
            "memory.map[:5] = b'world'\n"
            "memory.close()\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
        assert memory.map[:5] == b"world"
    finally:
        memory.close()
