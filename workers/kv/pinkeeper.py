"""The keeper of a pool's pins: a thread in the process that owns the pool.

It owns the page directory, answers the worker (and through it the peers), and lets peers read the pool. The engine's
own thread only hands offloads over and collects what was released, so that no peer ever makes it wait.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import Any

from zmq import LINGER, PAIR, POLLIN, RCVHWM, SNDHWM, Context, Poller

from workers.kv.control import Message, pack, unpack
from workers.kv.directory import PageDirectory
from workers.kv.layout import PoolLayout
from workers.kv.nixl_transport import NixlTarget
from workers.kv.staging import StagingMemory

logger = logging.getLogger(__name__)

_LEASED_POLL_MS = 1
"""While a peer may read, this side of the transport must be driven (it has no thread of its own: those spin)."""
_IDLE_POLL_MS = 1000


@dataclass(frozen=True, slots=True)
class Offload:
    """Pages that the engine offers: locked until `released` names their number.

    `pages` is called by the keeper, after the engine's device has written them.
    """

    number: int
    session_id: str
    keys: list[bytes]
    pages: Callable[[], list[int]]


class PinKeeper:
    """Pins, leases and staged pages of one pool.

    Args:
        layout: of the pool; it is registered with NIXL as `regions` (address, bytes).
        address: the worker's control channel.
        budget_tokens: what all pins together may take.
        staging_pages: pages that may wait in staging memory.
        wake: called from the keeper's thread when something was released.
    """

    def __init__(
        self,
        layout: PoolLayout,
        regions: Sequence[tuple[int, int]],
        address: str,
        budget_tokens: int,
        staging_pages: int,
        wake: Callable[[], None],
    ) -> None:
        self.layout = layout
        self.staging_pages = staging_pages
        self.staging = StagingMemory.create(staging_pages * layout.bytes_per_page)
        self.released: deque[int] = deque()
        self._directory = PageDirectory(layout.page_size, budget_tokens)
        self._numbers: dict[int, int] = {}
        self._target = NixlTarget(layout, regions)
        self._wake = wake
        self._staged: dict[str, dict[str, int]] = {}
        self._loading: set[str] = set()
        self._unstaging: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = Context()
        self._socket = self._context.socket(PAIR)
        self._socket.setsockopt(LINGER, 0)
        self._socket.setsockopt(SNDHWM, 0)
        self._socket.setsockopt(RCVHWM, 0)
        self._socket.connect(address)
        self._closing = False
        self._send(self._hello(budget_tokens))
        self._thread = threading.Thread(target=self._run, name="ampd-kv-keeper", daemon=True)
        self._thread.start()

    # -- the engine's thread

    def offload(self, offload: Offload) -> None:
        """Pin what the engine offers; in `released` when it may go."""
        self._post(lambda: self._add(offload))

    def staged(self, rid: str, keys: Sequence[str]) -> int:
        """How many of the first `keys` (hexadecimal, as the engine has them) wait in staging for request `rid`."""
        held = self._staged.get(rid)
        if not held:
            return 0
        return next((at for at, key in enumerate(keys) if key not in held), len(keys))

    def begin_load(self, rid: str, keys: Sequence[str]) -> list[int] | None:
        """Staging pages of `keys`, which stay until `end_load`; None if they have gone meanwhile."""
        with self._lock:
            held = self._staged.get(rid)
            if held is None or any(key not in held for key in keys):
                return None
            self._loading.add(rid)
            return [held[key] for key in keys]

    def end_load(self, rid: str) -> None:
        """The engine has copied the pages, or will not."""
        with self._lock:
            self._loading.discard(rid)
        self._post(lambda: self._finish_unstaging(rid))

    def reset(self) -> None:
        """Forget all pins and staged pages; returns when it has happened."""
        done = threading.Event()

        def clear() -> None:
            self._clear()
            done.set()

        self._post(clear)
        done.wait(10.0)

    def close(self) -> None:
        """End the thread and release memory and sockets."""
        self._closing = True
        os.eventfd_write(self._bell, 1)
        self._thread.join(10.0)
        self._target.close()
        self._socket.close(0)
        self._context.term()
        os.close(self._bell)
        self.staging.close()

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        os.eventfd_write(self._bell, 1)

    # -- the keeper's thread

    def _run(self) -> None:
        poller = Poller()
        poller.register(self._socket, POLLIN)
        poller.register(self._bell, POLLIN)
        while not self._closing:
            try:
                poller.poll(_LEASED_POLL_MS if self._directory.has_leases else _IDLE_POLL_MS)
                self._turn()
            except Exception:
                logger.exception("KV keeper failed in one turn")

    def _turn(self) -> None:
        self._drain_inbox()
        while self._socket.poll(0):
            message, keys = unpack(self._socket.recv_multipart())
            # What the engine offered before this message was sent must be known when it is answered.
            self._drain_inbox()
            self._answer(message, keys)
        if self._directory.has_leases:
            self._target.progress()
            self._free(self._directory.collect(time.monotonic()))
        self._tell_changes()

    def _drain_inbox(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while True:
            try:
                action = self._inbox.get_nowait()
            except Empty:
                return
            action()

    def _answer(self, message: Message, keys: list[bytes]) -> None:
        try:
            reply = getattr(self, f"_op_{message['op']}")(message, keys)
        except Exception as error:
            logger.exception("KV keeper: %s failed", message.get("op"))
            reply = {"error": f"{type(error).__name__}: {error}"}
        if reply is not None and "id" in message:
            self._send({"re": message["id"], **reply})

    def _op_begin(self, message: Message, keys: list[bytes]) -> None:
        self._free(self._directory.begin_request(message["session"], keys, time.monotonic()))

    def _op_end(self, message: Message, keys: list[bytes]) -> None:
        self._free(self._directory.end_request(message["session"], keys, time.monotonic()))
        self._evict()

    def _op_have(self, message: Message, keys: list[bytes]) -> Message:
        have = self._directory.match(keys)
        if have:
            self._free(self._directory.touch(message["session"], keys, time.monotonic()))
        return {"pages": have}

    def _op_match(self, _message: Message, keys: list[bytes]) -> Message:
        return {"pages": self._directory.match(keys)}

    def _op_lease(self, message: Message, keys: list[bytes]) -> Message:
        lease_id, pages = self._directory.lease(keys, message["ttl_s"], time.monotonic())
        return {"lease": lease_id, "pages": pages}

    def _op_unlease(self, message: Message, _keys: list[bytes]) -> Message:
        now_s = time.monotonic()
        live = self._directory.is_live(message["lease"], now_s)
        self._free(self._directory.unlease(message["lease"], now_s))
        return {"live": live}

    def _op_release(self, message: Message, _keys: list[bytes]) -> Message:
        before = self._directory.tokens
        self._free(self._directory.release_session(message["session"], time.monotonic()))
        return {"tokens": before - self._directory.tokens}

    def _op_held(self, message: Message, _keys: list[bytes]) -> Message:
        return {"tokens": self._directory.held_tokens(message["session"])}

    def _op_stage(self, message: Message, keys: list[bytes]) -> Message:
        self._staged[message["rid"]] = {key.hex(): page for key, page in zip(keys, message["pages"], strict=True)}
        return {}

    def _op_unstage(self, message: Message, _keys: list[bytes]) -> None:
        rid = message["rid"]
        with self._lock:
            self._staged.pop(rid, None)
        self._unstaging.setdefault(rid, []).append(message["id"])
        self._finish_unstaging(rid)

    def _op_stats(self, _message: Message, _keys: list[bytes]) -> Message:
        sessions = {name: self._directory.held_tokens(name) for name in self._directory.sessions}
        return {"tokens": self._directory.tokens, "sessions": sessions, "pins": len(self._numbers)}

    def _finish_unstaging(self, rid: str) -> None:
        if rid not in self._loading:
            for number in self._unstaging.pop(rid, []):
                self._send({"re": number})

    def _add(self, offload: Offload) -> None:
        pin = self._directory.add(offload.session_id, offload.keys, offload.pages())
        if pin is None:
            self._give_back([offload.number])
            return
        self._numbers[pin] = offload.number
        self._evict()

    def _evict(self) -> None:
        if self._directory.over_budget:
            self._free(self._directory.evict(time.monotonic()))

    def _free(self, pins: Sequence[int]) -> None:
        self._give_back([self._numbers.pop(pin) for pin in pins])

    def _give_back(self, numbers: Sequence[int]) -> None:
        if numbers:
            self.released.extend(numbers)
            self._wake()

    def _clear(self) -> None:
        self._directory.clear()
        self._numbers.clear()
        self.released.clear()
        with self._lock:
            self._staged.clear()
            self._loading.clear()
        for rid in list(self._unstaging):
            self._finish_unstaging(rid)

    def _tell_changes(self) -> None:
        changed = self._directory.take_changed()
        if changed:
            self._send({"event": "held", "sessions": changed, "tokens": self._directory.tokens})

    def _hello(self, budget_tokens: int) -> dict[str, Any]:
        process_id, fd = self.staging.place
        return {
            "event": "hello",
            "layout": asdict(self.layout),
            "agent": self._target.metadata.hex(),
            "staging": {"process": process_id, "fd": fd, "pages": self.staging_pages},
            "budget_tokens": budget_tokens,
        }

    def _send(self, message: Message) -> None:
        self._socket.send_multipart(pack(message))
