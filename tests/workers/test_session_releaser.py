"""Sessions end by request or by idleness, never under a running round."""

from typing import Any

import pytest

from ampd.state.store import Binding, StateUnavailableError
from tests.memory_store import MemoryState, MemoryStore
from tests.waiting import until
from workers.session_releaser import SessionEnds, SessionReleaser


class Kv:
    """The releases that were asked for."""

    def __init__(self) -> None:
        self.released: list[str] = []

    async def release_session(self, session_id: str) -> int:
        self.released.append(session_id)
        return 64


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def releaser(ttl_s: float = 10.0, first_ttl_s: float = 10.0) -> tuple[SessionReleaser, Kv, Clock]:
    kv, clock = Kv(), Clock()
    whole: Any = kv
    return SessionReleaser(whole, ttl_s, clock, first_ttl_s), kv, clock


async def test_a_release_waits_for_the_last_running_round() -> None:
    sessions, kv, _ = releaser()
    async with sessions.round("s"):
        async with sessions.round("s"):
            assert await sessions.release("s") == 0
        assert kv.released == []
    assert kv.released == ["s"]
    assert await sessions.release("s") == 64


async def test_a_session_that_goes_on_is_not_released() -> None:
    sessions, kv, _ = releaser()
    async with sessions.round("s"):
        await sessions.release("s")
        async with sessions.round("s"):
            pass
    assert kv.released == []


async def test_a_session_goes_with_its_last_round() -> None:
    sessions, kv, _ = releaser()
    async with sessions.round("s"):
        async with sessions.round("s", is_last=True):
            pass
        assert kv.released == []
    assert kv.released == ["s"]
    async with sessions.round("again", is_last=True), sessions.round("again"):
        pass
    assert kv.released == ["s"]


async def test_idle_sessions_go_after_the_ttl_and_running_ones_stay() -> None:
    sessions, kv, clock = releaser(ttl_s=10)
    async with sessions.round("old"):
        pass
    async with sessions.round("running"):
        clock.now_s = 9.0
        async with sessions.round("young"):
            pass
        assert await sessions.release_idle() == []
        clock.now_s = 10.0
        assert await sessions.release_idle() == ["old"]
        clock.now_s = 100.0
        assert await sessions.release_idle() == ["young"]
    assert await sessions.release_idle() == []
    clock.now_s = 200.0
    assert await sessions.release_idle() == ["running"]
    assert kv.released == ["old", "young", "running"]


async def test_a_session_with_one_round_goes_sooner() -> None:
    sessions, _, clock = releaser(ttl_s=10, first_ttl_s=3)
    for name in ("once", "twice", "twice"):
        async with sessions.round(name):
            pass
    clock.now_s = 3.0
    assert await sessions.release_idle() == ["once"]
    clock.now_s = 10.0
    assert await sessions.release_idle() == ["twice"]


async def test_a_session_that_had_a_round_elsewhere_does_not_go_sooner() -> None:
    sessions, _, clock = releaser(ttl_s=10, first_ttl_s=3)
    async with sessions.round("moved", has_context=True):
        pass
    clock.now_s = 3.0
    assert await sessions.release_idle() == []
    clock.now_s = 10.0
    assert await sessions.release_idle() == ["moved"]


async def test_a_session_that_goes_on_while_another_one_is_released_stays() -> None:
    sessions, kv, clock = releaser()
    for name in ("first", "second"):
        async with sessions.round(name):
            pass
    clock.now_s = 10.0
    second = sessions.round("second")

    async def release(session_id: str) -> int:
        kv.released.append(session_id)
        await second.__aenter__()
        return 64

    kv.release_session = release
    assert await sessions.release_idle() == ["first"]
    await second.__aexit__(None, None, None)
    assert kv.released == ["first"], "the second one has begun a round meanwhile"


async def test_what_comes_after_the_release_of_a_session_goes_too() -> None:
    sessions, kv, clock = releaser(ttl_s=10, first_ttl_s=3)
    async with sessions.round("s"):
        await sessions.release("s")
    clock.now_s = 5.0
    sessions.held("s", 16)
    assert await sessions.release_idle() == []
    clock.now_s = 8.0
    assert await sessions.release_idle() == ["s"]
    assert kv.released == ["s", "s"]


async def test_an_evicted_copy_is_no_lost_session() -> None:
    sessions, _, _ = releaser()
    async with sessions.round("copy", is_copy=True):
        pass
    async with sessions.round("own"):
        pass
    async with sessions.round("moved here", is_copy=True):
        pass
    async with sessions.round("moved here"):
        pass
    for session_id in ("copy", "own", "moved here"):
        sessions.held(session_id, 16)
        sessions.held(session_id, 0)
    assert sessions.evicted == 2


async def test_a_session_is_lost_once_and_only_if_it_was_held() -> None:
    sessions, _, _ = releaser()
    for session_id in ("short", "trimmed"):
        async with sessions.round(session_id):
            pass
    sessions.held("short", 0)
    assert sessions.evicted == 0
    for tokens in (16, 0, 0):
        sessions.held("trimmed", tokens)
    assert sessions.evicted == 1


async def test_a_session_runs_as_long_as_a_round_of_it() -> None:
    sessions, _, _ = releaser()
    assert not sessions.is_running("s")
    async with sessions.round("s"):
        assert sessions.is_running("s")
    assert not sessions.is_running("s")


@pytest.fixture
async def bound() -> MemoryState:
    """A shared state with the sessions s1 and s2 of the worker d1."""
    state = MemoryState()
    for session_id in ("s1", "s2"):
        await MemoryStore(state).rebind(Binding(session_id, "", 0), "d1", 60.0)
    return state


def ends_of(state: MemoryState) -> SessionEnds:
    store: Any = MemoryStore(state)
    return SessionEnds(store, "d1")


async def test_the_end_of_a_session_outlasts_an_outage_of_the_shared_state(
    bound: MemoryState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.session_releaser._AGAIN_S", 0.0)
    ends = ends_of(bound)
    ends.start()
    bound.lose()
    for session_id in ("s1", "s2"):
        ends.ended(session_id, 1)
    failures = ends._store.round_trips.failures
    await until(lambda: failures["end"] > 1)
    ends.begins("s2")
    told = failures["end"] + 1  # its end may be on its way
    await until(lambda: failures["end"] > told)
    bound.restore()
    await until(lambda: not len(ends))
    await ends.stop()
    assert await MemoryStore(bound).binding("s1") is None
    assert await MemoryStore(bound).binding("s2") == Binding("s2", "d1", 1), "it lives again"


async def test_a_worker_that_ends_tells_the_ends_that_it_knows(bound: MemoryState) -> None:
    ends = ends_of(bound)
    ends.ended("s1", 1)
    await ends.stop()
    assert await MemoryStore(bound).binding("s1") is None
    bound.lose()
    ends.ended("s2", 1)
    await ends.stop()
    assert len(ends) == 1


async def test_a_session_whose_end_fails_keeps_no_other_one_waiting(
    bound: MemoryState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.session_releaser._AGAIN_S", 0.0)
    ends = ends_of(bound)
    end_session = ends._store.end_session

    async def refusing(session_id: str, **last: Any) -> Binding | None:
        if session_id == "s1":
            raise StateUnavailableError("refused")
        return await end_session(session_id, **last)

    monkeypatch.setattr(ends._store, "end_session", refusing)
    for session_id in ("s1", "s2"):
        ends.ended(session_id, 1)
    ends.start()
    await until(lambda: len(ends) == 1)
    monkeypatch.undo()
    await ends.stop()
    assert not len(ends)


async def test_ends_that_wait_are_told_after_an_unexpected_error(
    bound: MemoryState, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = ends_of(bound)
    monkeypatch.setattr(ends._task, "_pause_s", 0.0)

    async def fails(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        raise LookupError

    monkeypatch.setattr(ends._store, "end_session", fails)
    ends.ended("s1", 1)
    ends.start()
    await until(lambda: not len(ends))
    await ends.stop()
