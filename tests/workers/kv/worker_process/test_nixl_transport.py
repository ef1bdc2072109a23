"""Reads between the stores of two workers over real NIXL, in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from ctypes import addressof, c_char
from typing import Any

import pytest

pytest.importorskip("nixl")

from tests.waiting import until
from workers.kv.worker_process.nixl_transport import NixlTransport, Remote, blocks_at

SIZE = 4096
FIRST, SECOND = [(0, 512)], [(1024, 512)]


class Holding(NixlTransport):
    """Its reads cannot be taken back once they have begun, as where the network card holds them."""

    @staticmethod
    def _cancelled(read: object) -> bool:  # noqa: ARG004
        return False


class Store:
    """A store of one worker, filled with one byte, and its transport."""

    def __init__(
        self, name: str, fill: int, forget_after_s: float = 600.0, kind: type[NixlTransport] = NixlTransport
    ) -> None:
        self.memory = bytearray([fill]) * SIZE
        self._pinned = (c_char * SIZE).from_buffer(self.memory)
        address = addressof(self._pinned)
        self.transport = kind(address, SIZE, forget_after_s)
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


async def test_a_read_that_is_given_up_ends(stack: ExitStack) -> None:
    ours, frozen = store(stack, "a", 1), store(stack, "frozen", 2)
    done, abandon = ours.transport.read(frozen.remote, FIRST, SECOND)
    await until(lambda: ours.transport._active)
    abandon()
    await until(done.done)
    assert isinstance(done.exception(), TimeoutError)
    assert not ours.transport._active


async def test_a_frozen_worker_gets_one_read_and_keeps_no_more_of_our_memory(stack: ExitStack) -> None:
    """Nothing drives the other side, as if its process were stopped; later it goes on."""
    ours = store(stack, "a", 1, kind=Holding)
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


@pytest.mark.parametrize("chosen", [None, "y"])
def test_ucx_polls_interfaces_without_traffic_unless_the_user_chose(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    """By default UCX may miss the first traffic of an interface, and reads hang then."""
    monkeypatch.setenv("UCX_ADAPTIVE_PROGRESS", "later")  # restored at the end
    monkeypatch.delenv("UCX_ADAPTIVE_PROGRESS")
    if chosen:
        monkeypatch.setenv("UCX_ADAPTIVE_PROGRESS", chosen)
    store(stack, "A", 1)
    assert os.environ["UCX_ADAPTIVE_PROGRESS"] == (chosen or "n")
