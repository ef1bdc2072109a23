"""The page directory: what it answers, and invariants under any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from workers.kv.directory import PageDirectory

PAGE = 16


def keys(text: str) -> list[bytes]:
    """One key a letter, each naming all the letters before it, as chained hashes do."""
    return [text[: i + 1].encode() for i in range(len(text))]


def tail(text: str, shared: int) -> list[bytes]:
    return keys(text)[shared:]


def test_match_is_the_longest_held_prefix_over_several_pins() -> None:
    directory = PageDirectory(PAGE, 10_000)
    directory.add("s", keys("abc"), [5, 6, 7])
    directory.add("s", tail("abcde", 3), [1, 2])
    assert directory.match(keys("abcdefg")) == 5
    assert directory.match(keys("abx")) == 2
    assert directory.match(keys("xbc")) == 0
    assert directory.lease(keys("abcdz"), ttl_s=1.0, now_s=0.0)[1] == [5, 6, 7, 1]
    assert directory.held_tokens("s") == 5 * PAGE


def test_a_hole_ends_the_prefix() -> None:
    directory = PageDirectory(PAGE, 10_000)
    directory.add("s", keys("ab"), [0, 1])
    directory.add("s", tail("abcd", 3), [3])
    assert directory.match(keys("abcd")) == 2


def test_release_waits_for_a_lease() -> None:
    directory = PageDirectory(PAGE, 10_000)
    pin = directory.add("s", keys("abc"), [0, 1, 2])
    lease, pages = directory.lease(keys("ab"), 5.0, now_s=0.0)
    assert pages == [0, 1]
    assert directory.release_session("s", 1.0) == []
    assert directory.match(keys("abc")) == 3
    assert directory.is_live(lease, 1.0)
    assert directory.unlease(lease, 2.0) == [pin]
    assert directory.match(keys("abc")) == 0
    assert directory.tokens == 0


def test_a_lease_ends_by_itself() -> None:
    directory = PageDirectory(PAGE, 10_000)
    pin = directory.add("s", keys("a"), [0])
    lease, _ = directory.lease(keys("a"), 5.0, now_s=0.0)
    directory.release_session("s", 1.0)
    assert directory.collect(4.9) == []
    assert not directory.is_live(lease, 5.0)
    assert directory.collect(5.0) == [pin]
    assert directory.unlease(lease, 6.0) == []


def test_nothing_held_is_no_lease() -> None:
    assert PageDirectory(PAGE, 10_000).lease(keys("abc"), 1.0, 0.0) == ("", [])


def test_a_shared_prefix_outlives_the_session_that_came_first() -> None:
    directory = PageDirectory(PAGE, 10_000)
    shared = directory.add("first", keys("sys"), [0, 1, 2])
    directory.begin_request("second", keys("sysX"), 0.0)
    own = directory.add("second", tail("sysX", 3), [3])
    assert directory.release_session("first", 1.0) == []
    assert directory.match(keys("sysX")) == 4
    assert directory.held_tokens("second") == 4 * PAGE
    assert set(directory.release_session("second", 2.0)) == {shared, own}


def test_a_rewritten_context_keeps_its_valid_prefix_and_drops_the_branch() -> None:
    directory = PageDirectory(PAGE, 10_000)
    directory.add("s", keys("ab"), [0, 1])
    branch = directory.add("s", tail("abcd", 2), [2, 3])
    assert directory.touch("s", keys("abX"), 0.0) == [branch]
    assert directory.held_tokens("s") == 2 * PAGE


def test_a_released_session_takes_no_late_pages_until_it_begins_again() -> None:
    directory = PageDirectory(PAGE, 10_000)
    directory.begin_request("s", [], 0.0)
    directory.add("s", keys("a"), [0])
    directory.release_session("s", 1.0)
    assert directory.add("s", tail("ab", 1), [1]) is None
    directory.end_request("s", keys("ab"), 2.0)
    assert directory.held_tokens("s") == 0
    assert directory.tokens == 0
    directory.begin_request("s", keys("ab"), 3.0)
    assert directory.add("s", keys("ab"), [0, 1]) is not None


def test_eviction_takes_the_least_recently_used_that_run_nothing() -> None:
    directory = PageDirectory(PAGE, 2 * PAGE)
    directory.begin_request("running", [], 0.0)
    directory.add("running", keys("r"), [0])
    old = directory.add("old", keys("o"), [1])
    young = directory.add("young", keys("y"), [2])
    assert directory.over_budget
    assert directory.evict(1.0) == [old]
    directory.add("running", tail("rs", 1), [3])
    assert directory.evict(2.0) == [young]
    assert directory.sessions == ["running"]


def test_eviction_does_not_take_more_because_a_lease_delays_it() -> None:
    directory = PageDirectory(PAGE, PAGE)
    directory.add("old", keys("o"), [0])
    directory.add("young", keys("y"), [1])
    lease, _ = directory.lease(keys("o"), 10.0, 0.0)
    assert directory.evict(1.0) == []
    assert directory.sessions == ["young"]
    assert len(directory.unlease(lease, 2.0)) == 1


def test_changes_are_told_once() -> None:
    directory = PageDirectory(PAGE, 10_000)
    directory.add("s", keys("ab"), [0, 1])
    assert directory.take_changed() == {"s": 2 * PAGE}
    assert directory.take_changed() == {}
    directory.release_session("s", 0.0)
    assert directory.take_changed() == {"s": 0}


def test_clear_drops_pins_and_leases() -> None:
    directory = PageDirectory(PAGE, 10_000)
    pin = directory.add("s", keys("ab"), [0, 1])
    lease, _ = directory.lease(keys("ab"), 10.0, 0.0)
    assert directory.clear() == [pin]
    assert not directory.is_live(lease, 0.0)
    assert directory.tokens == 0
    assert directory.match(keys("ab")) == 0
    assert directory.take_changed()["s"] == 0


def test_keys_and_pages_must_agree() -> None:
    with pytest.raises(ValueError, match="2 keys for 1 pages"):
        PageDirectory(PAGE, 1).add("s", keys("ab"), [1])


SESSIONS = st.sampled_from(["s1", "s2", "s3"])
CONTEXTS = st.text("ab", min_size=1, max_size=6)


class DirectoryMachine(RuleBasedStateMachine):
    """Any order of calls, as an engine, its sessions and its peers may make them."""

    @initialize(budget=st.integers(0, 12))
    def start(self, budget: int) -> None:
        self.directory = PageDirectory(PAGE, budget * PAGE)
        self.now_s = 0.0
        self.next_page = 0
        self.memory: dict[int, list[int]] = {}
        self.running = {"s1": 0, "s2": 0, "s3": 0}
        self.leases: dict[str, tuple[float, list[int]]] = {}
        self.evicted_now = False

    def free(self, pins: list[int]) -> None:
        for pin in pins:
            del self.memory[pin]
        self.leases = {name: lease for name, lease in self.leases.items() if lease[0] > self.now_s}

    @rule(session=SESSIONS, context=CONTEXTS)
    def prefill(self, session: str, context: str) -> None:
        held = self.directory.match(keys(context))
        new = keys(context)[held:]
        if not new:
            return
        pages = list(range(self.next_page, self.next_page + len(new)))
        self.next_page += len(new)
        pin = self.directory.add(session, new, pages)
        if pin is not None:
            self.memory[pin] = pages

    @rule(session=SESSIONS, context=CONTEXTS)
    def begin(self, session: str, context: str) -> None:
        self.running[session] += 1
        self.free(self.directory.begin_request(session, keys(context), self.now_s))

    @rule(session=SESSIONS, context=CONTEXTS)
    def end(self, session: str, context: str) -> None:
        self.running[session] = max(0, self.running[session] - 1)
        self.free(self.directory.end_request(session, keys(context), self.now_s))

    @rule(session=SESSIONS)
    def release(self, session: str) -> None:
        self.running[session] = 0
        self.free(self.directory.release_session(session, self.now_s))
        assert self.directory.held_tokens(session) == 0

    @rule(context=CONTEXTS, ttl_s=st.integers(1, 5))
    def lease(self, context: str, ttl_s: int) -> None:
        lease_id, pages = self.directory.lease(keys(context), ttl_s, self.now_s)
        assert len(pages) == self.directory.match(keys(context))
        assert (lease_id == "") == (not pages)
        if lease_id:
            self.leases[lease_id] = (self.now_s + ttl_s, pages)

    @rule(data=st.data())
    def unlease(self, data: st.DataObject) -> None:
        if self.leases:
            name = data.draw(st.sampled_from(sorted(self.leases)))
            del self.leases[name]
            self.free(self.directory.unlease(name, self.now_s))

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        self.free(self.directory.collect(self.now_s))

    @rule()
    def evict(self) -> None:
        self.free(self.directory.evict(self.now_s))
        leased = {page for _, pages in self.leases.values() for page in pages}
        kept_by_lease = sum(len(pages) for pages in self.memory.values() if leased & set(pages))
        within = self.directory.tokens - kept_by_lease * PAGE <= self.directory.budget_tokens
        assert within or any(self.running[name] for name in self.directory.sessions)

    @invariant()
    def leased_pages_are_still_there(self) -> None:
        there = {page for pages in self.memory.values() for page in pages}
        for lease_id, (_, pages) in self.leases.items():
            assert self.directory.is_live(lease_id, self.now_s)
            assert set(pages) <= there

    @invariant()
    def tokens_are_those_of_the_pins(self) -> None:
        assert self.directory.tokens == sum(map(len, self.memory.values())) * PAGE

    @invariant()
    def every_page_belongs_to_a_session_or_a_lease(self) -> None:
        if not self.leases and not self.directory.sessions:
            assert not self.memory

    @invariant()
    def a_session_holds_no_more_than_there_is(self) -> None:
        assert all(self.directory.held_tokens(name) <= self.directory.tokens for name in self.running)


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
