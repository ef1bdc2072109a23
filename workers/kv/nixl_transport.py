"""Records of a store over NIXL: one agent reads the stores of other workers, and lets them read this one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from queue import Empty, Queue
from typing import Any
from uuid import uuid4

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from workers.kv.peer_reads import Remote

log = logging.getLogger(__name__)

_READING_POLL_S = 0.0002
_ABANDONED_POLL_S = 0.05
"""While only reads are left that were given up, for example from a peer that is frozen."""
_LEASED_POLL_S = 0.001
"""While a peer may read, this side of the transport must be driven: NIXL's own thread would spin."""

_FORGET_S = 600.0

Blocks = np.ndarray[Any, np.dtype[np.uint64]]
"""Rows of (address, bytes, device id), as NIXL takes them."""


@dataclass(slots=True)
class _Known:
    """The agent of another worker, as this one's agent knows it."""

    digest: bytes
    name: str
    used_s: float


@dataclass(slots=True)
class _Read:
    remote: Remote
    theirs: Sequence[tuple[int, int]]
    ours: Sequence[tuple[int, int]]
    done: Future[int] = field(default_factory=Future)
    abandoned: bool = False
    handle: Any = None
    agent_name: str = ""


class NixlTransport:
    """The NIXL agent of one worker, on a thread of its own.

    Args:
        address, size_bytes: of the store in this process.
        forget_after_s: a worker from which nothing was read for this long is forgotten when another becomes known.
    """

    def __init__(self, address: int, size_bytes: int, forget_after_s: float = _FORGET_S) -> None:
        # Without NIXL's own progress thread: it spins on a core even when nothing moves.
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = nixl_agent(f"ampd-{uuid4().hex}", config)
        self._registered = self._agent.register_memory([(address, size_bytes, 0, "")], "DRAM")
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._address = address
        self._forget_after_s = forget_after_s
        self._remotes: dict[str, _Known] = {}
        self._leaving: list[_Known] = []
        self._jobs: Queue[Callable[[], None] | None] = Queue()
        self._active: list[_Read] = []
        self._leased_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="ampd-kv-nixl", daemon=True)
        self._thread.start()

    def read(
        self, remote: Remote, theirs: Sequence[tuple[int, int]], ours: Sequence[tuple[int, int]]
    ) -> tuple[Future[int], Callable[[], None]]:
        """Start to read blocks of another store into this one.

        Args:
            theirs, ours: (offset in the store, bytes) of each block, in the same order and of the same sizes.

        Returns:
            A future of the bytes read. It ends, well or with an error, only when nothing will be written any more:
            until then our blocks must not be used for anything else. And a function that gives the read up: nobody
            waits for it any more, and it ends when its source has answered. NIXL reports a read as taken back although
            its bytes may still come, so no read is taken back.
        """
        job = _Read(remote, theirs, ours)
        self._jobs.put(lambda: self._start(job))

        def abandon() -> None:
            job.abandoned = True

        return job.done, abandon

    def let_read(self, until_s: float) -> None:
        """Drive the transport until then (`time.monotonic`), because another worker may read."""

        def extend() -> None:
            self._leased_until_s = max(self._leased_until_s, until_s)

        self._jobs.put(extend)

    def close(self) -> None:
        """End the thread and the agent, so that nothing is written any more; reads that are still under way fail."""
        self._jobs.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while True:
            try:
                job: Callable[[], None] | None = self._jobs.get(timeout=self._pause_s())
            except Empty:
                job = self._progress
            if job is None:
                break
            try:
                job()
            except Exception:
                log.exception("KV transport failed in one turn")
        self._end_agent()

    def _end_agent(self) -> None:
        """In this order: NIXL fails at a read whose memory or agent has gone."""
        for read in self._active:
            with suppress(Exception):
                read.handle.release()
            read.handle = None
        with suppress(Exception):
            self._agent.deregister_memory(self._registered)
        self._agent = None
        for read in self._active:
            _fail(read, ConnectionError("the exchange was closed"))
        self._active.clear()

    def _pause_s(self) -> float | None:
        if self._active:
            return _ABANDONED_POLL_S if all(read.abandoned for read in self._active) else _READING_POLL_S
        return _LEASED_POLL_S if time.monotonic() < self._leased_until_s else None

    def _progress(self) -> None:
        try:
            self._agent.get_new_notifs()
        except Exception:
            log.exception("KV transport: no progress")
        self._active = [read for read in self._active if not self._settled(read)]
        self._remove_departed()

    def _start(self, read: _Read) -> None:
        if not read.done.set_running_or_notify_cancel() or read.abandoned:
            return _fail(read, TimeoutError("given up before it began"))
        source = read.remote.worker_id
        if any(other.abandoned and other.remote.worker_id == source for other in self._active):
            # Our blocks of the other read are not free before it ends. More of them would be lost to a frozen worker.
            return _fail(read, ConnectionError(f"{source} has not answered an earlier read yet"))
        try:
            read.agent_name = self._remote_agent(read.remote)
            theirs = self._agent.get_xfer_descs(blocks_at(read.remote.address, read.theirs), "DRAM")
            ours = self._agent.get_xfer_descs(blocks_at(self._address, read.ours), "DRAM")
            read.handle = self._agent.initialize_xfer("READ", ours, theirs, read.agent_name)
            state = self._agent.transfer(read.handle)
        except Exception as error:
            self._forget(read.remote.worker_id)
            return _fail(read, ConnectionError(f"KV read from {read.remote.worker_id} failed: {error}"))
        if state == "PROC":
            self._active.append(read)
        else:
            self._finish(read, state)
        return None

    def _settled(self, read: _Read) -> bool:
        try:
            state = self._agent.check_xfer_state(read.handle)
        except Exception as error:
            log.debug("KV read from %s: %s", read.remote.worker_id, error)
            state = "ERR"
        if state == "PROC":
            return False
        self._finish(read, state)
        return True

    def _finish(self, read: _Read, state: str) -> None:
        with suppress(Exception):
            read.handle.release()
        if state == "DONE":
            read.done.set_result(sum(size for _, size in read.ours))
        else:
            self._forget(read.remote.worker_id)
            _fail(read, ConnectionError(f"KV read from {read.remote.worker_id} failed in the transport"))

    def _remote_agent(self, remote: Remote) -> str:
        """The name of another worker's agent. A worker that was restarted has another agent under the same id."""
        digest, now_s = sha256(remote.agent).digest(), time.monotonic()
        known = self._remotes.get(remote.worker_id)
        if known and known.digest == digest:
            known.used_s = now_s
            return known.name
        self._forget(remote.worker_id)
        self._forget_unused(now_s)
        known = self._leaving_agent(digest) or self._added_agent(remote.agent, digest)
        known.used_s = now_s
        self._remotes[remote.worker_id] = known
        return known.name

    def _leaving_agent(self, digest: bytes) -> _Known | None:
        """An agent that was to be removed, from which something is still being read."""
        for known in self._leaving:
            if known.digest == digest:
                self._leaving.remove(known)
                return known
        return None

    def _added_agent(self, agent: bytes, digest: bytes) -> _Known:
        name = self._agent.add_remote_agent(agent)
        return _Known(digest, name.decode() if isinstance(name, bytes) else str(name), 0.0)

    def _forget_unused(self, now_s: float) -> None:
        """Forget workers that have not been used for long. One that still serves is only met again."""
        for worker_id, known in list(self._remotes.items()):
            if known.used_s < now_s - self._forget_after_s:
                self._forget(worker_id)

    def _forget(self, worker_id: str) -> None:
        if known := self._remotes.pop(worker_id, None):
            self._leaving.append(known)
            self._remove_departed()

    def _remove_departed(self) -> None:
        """Remove agents that are forgotten, when nothing is read from them any more.

        NIXL loses sight of the reads from an agent that is removed or added again, and their bytes still come.
        """
        if not self._leaving:
            return
        read_from = {read.agent_name for read in self._active}
        for known in [known for known in self._leaving if known.name not in read_from]:
            self._leaving.remove(known)
            with suppress(Exception):
                self._agent.remove_remote_agent(known.name)


def blocks_at(address: int, blocks: Sequence[tuple[int, int]]) -> Blocks:
    """The rows of blocks (offset, bytes) of a store at an address."""
    rows = np.zeros((len(blocks), 3), dtype=np.uint64)
    table = np.asarray(blocks, dtype=np.uint64).reshape(-1, 2)
    rows[:, 0] = table[:, 0] + np.uint64(address)
    rows[:, 1] = table[:, 1]
    return rows


def _fail(read: _Read, error: Exception) -> None:
    if not read.done.done():
        read.done.set_exception(error)
