"""The keeper of a pool's pins: a thread in the process that owns the pool.

It owns the page directory, answers the worker (and through it the peers), and lets peers read the pool. The engine's
own thread only hands over offloads and collects released pages, so that it never waits for a peer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workers.kv.control import Message
from workers.kv.directory import PageDirectory
from workers.kv.keeper_channel import KeeperChannel
from workers.kv.layout import PoolLayout
from workers.kv.nixl_transport import NixlTarget
from workers.kv.staged_pages import StagedPages
from workers.kv.staging import StagingMemory

log = logging.getLogger(__name__)

_LEASED_POLL_MS = 1
"""While a peer may read, this side of the transport must be driven: it has no thread, because NIXL's threads spin."""
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
        budget_tokens: the most tokens that all pins together may hold.
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
        self._staged = StagedPages()
        self._channel = KeeperChannel(address)
        self._closing = False
        self._channel.send(self._hello(budget_tokens))
        self._thread = threading.Thread(target=self._run, name="ampd-kv-keeper", daemon=True)
        self._thread.start()

    # -- the engine's thread

    def offload(self, offload: Offload) -> None:
        """Pin the pages that the engine offers. `released` names them when they may go."""
        self._channel.post(lambda: self._add(offload))

    def staged(self, rid: str, keys: Sequence[str]) -> int:
        """How many of the first `keys` (hexadecimal, as the engine has them) wait in staging for request `rid`."""
        return self._staged.count(rid, keys)

    def begin_load(self, rid: str, keys: Sequence[str]) -> list[int] | None:
        """Staging pages of `keys`, which stay until `end_load`; None if they have gone meanwhile."""
        return self._staged.begin_load(rid, keys)

    def end_load(self, rid: str) -> None:
        """The engine has copied the pages, or will not."""
        self._staged.end_load(rid)
        self._channel.post(lambda: self._answer_removals(self._staged.take_removed(rid)))

    def reset(self) -> None:
        """Forget all pins and staged pages; returns when it has happened."""
        done = threading.Event()

        def clear() -> None:
            self._clear()
            done.set()

        self._channel.post(clear)
        done.wait(10.0)

    def close(self) -> None:
        """End the thread and release memory and sockets."""
        self._closing = True
        self._channel.wake()
        self._thread.join(10.0)
        self._target.close()
        self._channel.close()
        self.staging.close()

    # -- the keeper's thread

    def _run(self) -> None:
        while not self._closing:
            try:
                self._channel.wait(_LEASED_POLL_MS if self._directory.has_leases else _IDLE_POLL_MS)
                self._turn()
            except Exception:
                log.exception("KV keeper failed in one turn")

    def _turn(self) -> None:
        self._channel.run_actions()
        for message, keys in self._channel.messages():
            # Pages that the engine offered before this message was sent must be known when it is answered.
            self._channel.run_actions()
            self._answer(message, keys)
        if self._directory.has_leases:
            self._target.progress()
            self._free(self._directory.collect(time.monotonic()))
        self._send_changes()

    def _answer(self, message: Message, keys: list[bytes]) -> None:
        try:
            reply = getattr(self, f"_op_{message['op']}")(message, keys)
        except Exception as error:
            log.exception("KV keeper: %s failed", message.get("op"))
            reply = {"error": f"{type(error).__name__}: {error}"}
        if reply is not None and "id" in message:
            self._channel.send({"re": message["id"], **reply})

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
        self._staged.add(message["rid"], keys, message["pages"])
        return {}

    def _op_unstage(self, message: Message, _keys: list[bytes]) -> None:
        self._staged.remove(message["rid"], message["id"])
        self._answer_removals(self._staged.take_removed(message["rid"]))

    def _op_stats(self, _message: Message, _keys: list[bytes]) -> Message:
        sessions = {name: self._directory.held_tokens(name) for name in self._directory.sessions}
        return {"tokens": self._directory.tokens, "sessions": sessions, "pins": len(self._numbers)}

    def _answer_removals(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._channel.send({"re": number})

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
        self._answer_removals(self._staged.clear())

    def _send_changes(self) -> None:
        changed = self._directory.take_changed()
        if changed:
            self._channel.send({"event": "held", "sessions": changed, "tokens": self._directory.tokens})

    def _hello(self, budget_tokens: int) -> dict[str, Any]:
        process_id, fd = self.staging.place
        return {
            "event": "hello",
            "layout": asdict(self.layout),
            "agent": self._target.metadata.hex(),
            "staging": {"process": process_id, "fd": fd, "pages": self.staging_pages},
            "budget_tokens": budget_tokens,
        }
