"""KV pages over NIXL: the passive side that lets its pool be read, and the reader."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4

from nixl._api import nixl_agent, nixl_agent_config

from workers.kv.layout import Descriptor, PoolLayout, runs

log = logging.getLogger(__name__)

_POLL_S = 0.0002


def _agent(role: str) -> Any:
    # Without NIXL's own progress thread: it spins on a core even when nothing moves.
    return nixl_agent(f"ampd-{role}-{uuid4().hex}", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


class NixlTarget:
    """The side that is read: registers a pool and answers for its memory.

    Args:
        layout: of the pool.
        regions: (address, bytes) of the allocations that hold it.
    """

    def __init__(self, layout: PoolLayout, regions: Sequence[tuple[int, int]]) -> None:
        self._agent = _agent("pool")
        rows = [(address, size, layout.device_id, "") for address, size in regions]
        self._registered = self._agent.register_memory(rows, layout.memory)
        self.metadata: bytes = self._agent.get_agent_metadata()

    def progress(self) -> None:
        """Drive the transport; readers depend on it while they connect and read."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        with suppress(Exception):
            self._agent.deregister_memory(self._registered)


@dataclass(slots=True)
class _Read:
    peer: str
    descriptor: Descriptor
    sources: Sequence[int]
    targets: Sequence[int]
    done: Future[int] = field(default_factory=Future)
    abandoned: bool = False
    handle: Any = None


class NixlReader:
    """Reads pages of peers into staging memory, on a thread of its own.

    Args:
        staging: layout of the local staging memory.
    """

    def __init__(self, staging: PoolLayout) -> None:
        self._staging = staging
        self._agent = _agent("reader")
        size = staging.pages * staging.bytes_per_page
        self._registered = self._agent.register_memory([(staging.addresses[0], size, 0, "")], "DRAM")
        self._peers: dict[str, tuple[bytes, str]] = {}
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._active: list[_Read] = []
        self._thread = threading.Thread(target=self._run, name="ampd-kv-reader", daemon=True)
        self._thread.start()

    def read(
        self, peer: str, descriptor: Descriptor, sources: Sequence[int], targets: Sequence[int]
    ) -> tuple[Future[int], Callable[[], None]]:
        """Start to read pages `sources` of a peer into staging pages `targets`.

        Returns:
            A future of the bytes read. It ends, well or with an error, only when nothing will be written any more:
            until then the target pages must not be used for anything else. And a function that gives the read up.
        """
        job = _Read(peer, descriptor, sources, targets)
        self._jobs.put(lambda: self._start(job))

        def abandon() -> None:
            job.abandoned = True

        return job.done, abandon

    def close(self) -> None:
        """End the thread; reads that are still under way fail."""
        self._jobs.put(None)
        self._thread.join(5.0)
        with suppress(Exception):
            self._agent.deregister_memory(self._registered)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(block=not self._active)
            except Empty:
                self._active = [read for read in self._active if not self._settled(read)]
                time.sleep(_POLL_S if self._active else 0)
                continue
            if job is None:
                break
            job()
        for read in self._active:
            self._end(read, ConnectionError("the exchange was closed"))

    def _start(self, read: _Read) -> None:
        if not read.done.set_running_or_notify_cancel() or read.abandoned:
            return self._end(read, TimeoutError("given up before it began"))
        try:
            remote = self._remote(read.peer, read.descriptor)
            read.handle = self._prepare(read, remote)
            state = self._agent.transfer(read.handle)
        except Exception as error:
            self._peers.pop(read.peer, None)
            return self._end(read, ConnectionError(f"KV read from {read.peer} failed: {error}"))
        if state == "PROC":
            self._active.append(read)
        else:
            self._finish(read, state)
        return None

    def _prepare(self, read: _Read, remote: str) -> Any:
        sources, targets, lengths = runs(read.sources, read.targets)
        layout = read.descriptor.layout
        theirs = self._agent.get_xfer_descs(layout.blocks(sources, lengths), layout.memory)
        ours = self._agent.get_xfer_descs(self._staging.blocks(targets, lengths), "DRAM")
        return self._agent.initialize_xfer("READ", ours, theirs, remote)

    def _settled(self, read: _Read) -> bool:
        try:
            state = self._agent.check_xfer_state(read.handle)
        except Exception as error:
            log.debug("KV read from %s: %s", read.peer, error)
            state = "ERR"
        if state == "PROC":
            return read.abandoned and self._cancelled(read)
        self._finish(read, state)
        return True

    def _cancelled(self, read: _Read) -> bool:
        """Try to take a read back; until that succeeds its target pages may still be written."""
        try:
            read.handle.release()
        except Exception:
            return False
        self._end(read, TimeoutError("given up"))
        return True

    def _finish(self, read: _Read, state: str) -> None:
        with suppress(Exception):
            read.handle.release()
        if state == "DONE":
            read.done.set_result(len(read.sources) * self._staging.bytes_per_page)
        else:
            self._forget(read.peer)
            self._end(read, ConnectionError(f"KV read from {read.peer} failed in the transport"))

    @staticmethod
    def _end(read: _Read, error: Exception) -> None:
        if not read.done.done():
            read.done.set_exception(error)

    def _remote(self, peer: str, descriptor: Descriptor) -> str:
        """The peer's agent; a peer that was restarted has another one under the same name."""
        digest = sha256(descriptor.agent).digest()
        known = self._peers.get(peer)
        if known and known[0] == digest:
            return known[1]
        if known:
            self._forget(peer)
        name = self._agent.add_remote_agent(descriptor.agent)
        remote = name.decode() if isinstance(name, bytes) else str(name)
        self._peers[peer] = (digest, remote)
        return remote

    def _forget(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known:
            with suppress(Exception):
                self._agent.remove_remote_agent(known[1])
