"""Runs of records: what keys find, which pages claims protect, and in which order the rest goes."""

from __future__ import annotations

from workers.kv.store.records import RecordAllocator
from workers.kv.store.runs import Claimant, PageRun, PageSpan, RunTable, first_pages

from .store_lab import keys

_BYTES = 64


def table_of(*runs: str) -> tuple[RunTable, RecordAllocator, list[PageRun]]:
    """A table with written runs of these pages, which no claimant needs."""
    allocator = RecordAllocator(64 * _BYTES, [_BYTES])
    table, made = RunTable(allocator), []
    for pages in runs:
        run = table.add(keys(pages), allocator.allocate(_BYTES, len(pages)))
        run.ready = True
        table.claim(claimant := Claimant(protects=True), run, len(pages))
        table.release(claimant)
        made.append(run)
    return table, allocator, made


def test_spans_are_the_longest_written_prefix_and_stretches_are_all_that_is_there() -> None:
    table, allocator, (first,) = table_of("abc")
    behind_hole = table.add(keys("abzxy")[3:], allocator.allocate(_BYTES, 2))
    assert [(span.run, span.at, span.pages) for span in table.spans(keys("abz"))] == [(first, 0, 2)]
    stretches = [(at, span.run, span.pages) for at, span in table.stretches(keys("abzxyq"))]
    assert stretches == [(0, first, 2), (3, behind_hole, 2)]
    assert table.absent(keys("abzxyq")) == [2, 5]
    assert [span.run for span in table.spans(keys("abc"))] == [first]
    first.ready = False
    assert [span.run for span in table.spans(keys("abc"))] == []
    assert [span.run for span in table.spans(keys("abc"), written_only=False)] == [first]


def test_first_pages_cut_the_last_span() -> None:
    _, _, (first, second) = table_of("abc", "xy")
    spans = [PageSpan(first, 0, 3), PageSpan(second, 0, 2)]
    assert first_pages(spans, 4) == [spans[0], PageSpan(second, 0, 1)]
    assert first_pages(spans, 0) == []


def test_claims_count_by_the_most_pages_that_a_session_or_a_request_needs() -> None:
    table, _, (run,) = table_of("abcd")
    idle, running = Claimant(protects=False, is_session=True), Claimant(protects=True)
    table.claim(idle, run, 4)
    table.claim(running, run, 2)
    assert (table.session_pages, table.protected_pages, run.needed_pages(), run.needed_pages(idle)) == (4, 2, 4, 2)
    assert not run.is_shared(1)
    table.claim(other := Claimant(protects=False, is_session=True, is_copy=True), run, 3)
    assert run.is_shared(3)
    table.release(idle)
    assert (table.session_pages, run.needed_pages()) == (0, 3), "a copy is of another worker's session"
    table.set_kind(other, protects=True, is_copy=False)
    assert (table.session_pages, table.protected_pages) == (3, 3)


def test_the_run_that_was_unused_for_longest_goes_first_and_from_its_end() -> None:
    table, allocator, (first, second) = table_of("abc", "xy")
    free_bytes = allocator.free_bytes
    table.claim(Claimant(protects=False), first, 1)
    # A claim on a part of a run counts as use.
    assert (table.evict_unused(1), second.keys) == (1, keys("x"))
    assert (table.evict_unused(5), table.evict_unused(5), first.keys) == (1, 2, keys("a"))
    assert (table.evict_unused(5), table.pages) == (0, 1)
    assert allocator.free_bytes - free_bytes == 4 * _BYTES


def test_a_forgotten_run_keeps_its_memory_until_its_readers_have_ended() -> None:
    table, allocator, (run,) = table_of("abc")
    free_bytes = allocator.free_bytes
    table.claim(reader := Claimant(protects=True), run, 3)
    table.forget(run)
    assert (table.absent(keys("abc")), table.pages, table.protected_pages) == ([0, 1, 2], 0, 0)
    assert allocator.free_bytes == free_bytes
    table.release(reader)
    assert allocator.free_bytes - free_bytes == 3 * _BYTES


def test_a_run_that_its_writer_gave_up_is_free_at_once() -> None:
    table, allocator, (run,) = table_of("abc")
    free_bytes = allocator.free_bytes
    table.claim(writer := Claimant(protects=True), run, 3)
    table.discard(run)
    assert (table.pages, writer.path, allocator.free_bytes - free_bytes) == (0, {}, 3 * _BYTES)


def test_records_of_further_pools_go_with_their_pages() -> None:
    table, allocator, (run,) = table_of("abcd")
    for at in (1, 3):
        table.add_trailing(run, "window", at, allocator.allocate(_BYTES, 1)[0])
    table.claim(Claimant(protects=True), run, 2)
    assert table.evictable_trailing["window"] == 1
    assert len(list(table.evictable_offsets())) == 2 + 1
    table.evict_unused(9)
    assert (run.keys, list(run.trailing["window"]), table.evictable_trailing["window"]) == (keys("ab"), [1], 0)
