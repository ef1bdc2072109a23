"""Reads between the stores of two workers over real NIXL, in one process."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from ctypes import addressof, c_char
from multiprocessing.connection import Connection
from typing import Any

import pytest

pytest.importorskip("nixl")

from tests.waiting import until
from workers.kv.nixl_transport import NixlTransport, blocks_at
from workers.kv.peer_reads import Remote

SIZE = 4096
FIRST, SECOND = [(0, 512)], [(1024, 512)]


class Store:
    """A store of one worker, filled with one byte, and its transport."""

    def __init__(self, name: str, fill: int, forget_after_s: float = 600.0, size: int = SIZE) -> None:
        self.memory = bytearray([fill]) * size
        self._pinned = (c_char * size).from_buffer(self.memory)
        address = addressof(self._pinned)
        self.transport = NixlTransport(address, size, forget_after_s)
        self.remote = Remote(name, self.transport.metadata, address)

    def let_read(self) -> None:
        self.transport.let_read(time.monotonic() + 30.0)

    @property
    def known(self) -> set[str]:
        return set(self.transport._remotes)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def store(stack: ExitStack, name: str, fill: int, **options: Any) -> Store:
    made = Store(name, fill, **options)
    stack.callback(made.transport.close)
    return made


def test_a_block_is_read(stack: ExitStack) -> None:
    ours, theirs = store(stack, "a", 1), store(stack, "b", 2)
    theirs.let_read()
    done, _ = ours.transport.read(theirs.remote, FIRST, SECOND)
    assert done.result(30.0) == 512
    assert ours.memory == bytes([1] * 1024 + [2] * 512 + [1] * (SIZE - 1536))


def test_workers_from_which_nothing_was_read_for_long_are_forgotten(stack: ExitStack) -> None:
    ours = store(stack, "a", 1, forget_after_s=0.0)
    for name in ("b", "c", "d"):
        theirs = store(stack, name, 2)
        theirs.let_read()
        for _ in range(2):
            assert ours.transport.read(theirs.remote, FIRST, SECOND)[0].result(30.0) == 512
    assert ours.known == {"d"}


def test_workers_that_are_used_stay_known(stack: ExitStack) -> None:
    ours = store(stack, "a", 1)
    for name in ("b", "c"):
        theirs = store(stack, name, 2)
        theirs.let_read()
        ours.transport.read(theirs.remote, FIRST, SECOND)[0].result(30.0)
    assert ours.known == {"b", "c"}


async def test_a_read_that_was_given_up_keeps_its_memory_until_its_last_byte_has_come(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP the bytes come when the source goes on, also if the read was given up before."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    size = 1 << 20
    ours, frozen = store(stack, "a", 1, size=size), store(stack, "frozen", 2, size=size)
    done, abandon = ours.transport.read(frozen.remote, [(0, size)], [(0, size)])
    await until(lambda: ours.transport._active)
    abandon()
    await until(lambda: ours.transport._pause_s() == pytest.approx(0.05))
    # Two turns of the transport, in each of which it could have been taken back.
    for _ in range(2):
        await asyncio.wrap_future(in_turn(ours.transport, lambda: None))
    assert not done.done()
    assert ours.memory.count(2) < size, "not all bytes have come"
    frozen.let_read()
    await until(done.done)
    assert ours.memory.count(2) == size


@pytest.mark.parametrize("how", ["it fails for another read", "its worker was restarted"])
async def test_a_read_from_an_agent_that_is_forgotten_goes_on(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    size = 1 << 20
    ours, theirs, restarted = (store(stack, name, fill, size=size) for name, fill in (("a", 1), ("b", 2), ("b", 3)))
    done, _ = ours.transport.read(theirs.remote, [(0, size // 2)], [(0, size // 2)])
    await until(lambda: ours.transport._active)
    await asyncio.wrap_future(in_turn(ours.transport, lambda: ours.transport._forget("b")))
    again = theirs if how == "it fails for another read" else restarted
    more, _ = ours.transport.read(again.remote, [(size // 2, size // 2)], [(size // 2, size // 2)])
    await until(lambda: len(ours.transport._active) == 2)
    theirs.let_read()
    restarted.let_read()
    assert await asyncio.wrap_future(done) == await asyncio.wrap_future(more) == size // 2
    await until(lambda: not ours.transport._leaving)
    assert ours.memory.count(2) == (size if again is theirs else size // 2)


def in_turn(transport: NixlTransport, work: Callable[[], None]) -> Future[None]:
    """Run something on the thread of a transport; returns when it has run."""
    done: Future[None] = Future()

    def run() -> None:
        work()
        done.set_result(None)

    transport._jobs.put(run)
    return done


async def test_progress_that_fails_does_not_end_the_transport(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    ours, theirs = store(stack, "a", 1), store(stack, "b", 2)
    remove_departed = ours.transport._remove_departed
    failures: list[Exception] = []

    def fail_once() -> None:
        if not failures:
            failures.append(RuntimeError("injected"))
            raise failures[0]
        remove_departed()

    monkeypatch.setattr(ours.transport, "_remove_departed", fail_once)
    done, _ = ours.transport.read(theirs.remote, FIRST, SECOND)
    await until(lambda: failures)
    theirs.let_read()
    assert await asyncio.wait_for(asyncio.wrap_future(done), 20.0) == 512


async def test_a_frozen_worker_gets_one_read_and_keeps_no_more_of_our_memory(stack: ExitStack) -> None:
    """Nothing drives the other side, as if its process were stopped; later it goes on."""
    ours = store(stack, "a", 1)
    frozen, other = store(stack, "frozen", 2), store(stack, "other", 3)
    done, abandon = ours.transport.read(frozen.remote, FIRST, SECOND)
    await until(lambda: ours.transport._active)
    abandon()
    await until(lambda: ours.transport._pause_s() == pytest.approx(0.05))
    second, _ = ours.transport.read(frozen.remote, FIRST, SECOND)
    with pytest.raises(ConnectionError, match="has not answered an earlier read"):
        second.result(30.0)
    other.let_read()
    assert ours.transport.read(other.remote, FIRST, [(2048, 512)])[0].result(30.0) == 512
    assert not done.done(), "its memory may still be written"
    frozen.let_read()
    await until(done.done)
    frozen.let_read()
    assert ours.transport.read(frozen.remote, FIRST, SECOND)[0].result(30.0) == 512


def idle_worker(pipe: Connection) -> None:
    """In a process of its own: a store that nothing drives."""
    idle = Store("killed", 2, size=1 << 20)
    pipe.send(idle.remote)
    pipe.recv()


async def test_a_read_from_a_worker_that_is_killed_ends(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its memory here would never be free."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    size = 1 << 20
    ours = store(stack, "a", 1, size=size)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=idle_worker, args=(there,), daemon=True)
    process.start()
    stack.callback(process.join)
    stack.callback(process.kill)
    remote = await asyncio.to_thread(here.recv)
    done, abandon = ours.transport.read(remote, [(0, size)], [(0, size)])
    await until(lambda: ours.transport._active)
    abandon()
    process.kill()
    await until(done.done)
    assert isinstance(done.exception(), ConnectionError)


def test_the_descriptor_of_a_store_lets_its_owner_write_there(stack: ExitStack) -> None:
    """NIXL registers memory for reads and writes alike. So descriptors are for members, and after a match only."""
    ours, theirs = store(stack, "a", 1), store(stack, "b", 2)
    theirs.let_read()
    agent = ours.transport._agent
    name = agent.add_remote_agent(theirs.remote.agent)
    there = agent.get_xfer_descs(blocks_at(theirs.remote.address, FIRST), "DRAM")
    here = agent.get_xfer_descs(blocks_at(ours.remote.address, FIRST), "DRAM")
    handle = agent.initialize_xfer("WRITE", here, there, name)
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    assert state == "DONE"
    assert theirs.memory[:512] == bytes([1] * 512)
    handle.release()
    agent.remove_remote_agent(name)
