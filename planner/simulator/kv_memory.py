"""The KV memory of one worker: KV of sessions between rounds, reservations of running rounds, and evictions."""

from __future__ import annotations

from collections.abc import Callable

from planner.simulator.session_kv import NO_PREFIXES, SessionKv
from planner.simulator.shared_prefixes import SessionPrefix


class KvMemory(SessionKv):
    """The KV on the device.

    A session is *idle* between its rounds (its KV may be evicted, the least recently used first), *protected* while a
    round of it waits or is read by a peer, or *running* (its whole round's context is reserved).

    Args:
        capacity_tokens: 0: unlimited.

    Attributes:
        on_room: called when a reservation that failed may succeed now.
    """

    __slots__ = ("_reserved", "on_room")

    def __init__(
        self, capacity_tokens: int, page_tokens: int, prefixes: dict[str, SessionPrefix] = NO_PREFIXES
    ) -> None:
        super().__init__(capacity_tokens, page_tokens, prefixes)
        self.on_room: Callable[[], None] = lambda: None
        self._reserved: dict[str, int] = {}

    @property
    def running_tokens(self) -> int:
        """Tokens that running rounds have reserved, their histories included."""
        return sum(self._reserved.values())

    def device_tokens(self, session_id: str) -> int:
        """Tokens of a session's context with KV on the device."""
        return SessionKv.held_tokens(self, session_id)

    def prefix_tokens(self, session_id: str) -> int:
        """The part of a session's context that is here with the prefix that it shares."""
        return self.prefixes.held_tokens(session_id)

    def shared_prefixes(self) -> dict[str, int]:
        """Key -> tokens of the prefixes at this worker that two sessions have used."""
        return self.prefixes.published()

    def computed(self, session_id: str, tokens: int) -> None:
        """The KV of the first `tokens` of a running round is here: other sessions find what they share of it."""
        self.prefixes.computed(session_id, tokens)

    def is_running(self, session_id: str) -> bool:
        """Whether a round of the session has a reservation."""
        return session_id in self._reserved

    def reserve(self, session_id: str, tokens: int) -> bool:
        """Make room for a round of the session with `tokens` in total, the KV that it already holds included.

        Evicts idle sessions and, if no round runs, also sessions with waiting rounds. False: it does not fit now.
        """
        if not self.capacity_tokens:
            self._take(session_id, tokens)
            return True
        # The session's own KV must not be evicted to make room for it.
        self._leave_idle(session_id)
        room = self.capacity_tokens - self.prefixes.growth(session_id, self.held.get(session_id, 0), tokens)
        self._evict_unused(session_id, room)
        while self.used_tokens > room and (first := self._first_idle()) is not None:
            self._evict(first)
        self._evict_unused(session_id, room)
        if self.used_tokens > room and not self._reserved:
            for other in [name for name in reversed(self._protections) if name != session_id]:
                self._evict(other)
                if self.used_tokens <= room:
                    break
            if self.used_tokens > room:
                # A session that has rewritten its context, or shares less of the prefix than others did, needs less of
                # it, or nothing, than is here.
                self.used_tokens -= self.prefixes.drop(session_id)
                room = self.capacity_tokens - self.prefixes.growth(session_id, self.held.get(session_id, 0), tokens)
        if self.used_tokens > room:
            self._rest(session_id)
            return False
        self._take(session_id, tokens)
        return True

    def settle(self, session_id: str, context_tokens: int) -> None:
        """End a reservation; the full pages of the session's first `context_tokens` stay."""
        held = self._pages(context_tokens)
        self.prefixes.computed(session_id, held)
        self.used_tokens += self.prefixes.change(session_id, self._reserved.pop(session_id), held)
        self._set_held(session_id, held)
        self._rest(session_id)

    def release(self, session_id: str) -> None:
        """Drop the KV of a session that has ended."""
        if session_id not in self._reserved:
            self._drop(session_id)
            self.on_room()

    def cut(self, session_id: str, tokens: int) -> None:
        """Drop the pages behind the first `tokens` of a session that does not run: its context was rewritten."""
        held = self.held.get(session_id, 0)
        kept = min(held, self._pages(tokens))
        self.used_tokens += self.prefixes.change(session_id, held, kept)
        self._set_held(session_id, kept)
        if not kept:
            self._leave_idle(session_id)
        self.on_room()

    def _take(self, session_id: str, tokens: int) -> None:
        self.used_tokens += self.prefixes.change(session_id, self.held.get(session_id, 0), tokens)
        self._reserved[session_id] = tokens
        self._leave_idle(session_id)

    def _rest(self, session_id: str) -> None:
        if session_id in self.held and session_id not in self._protections and session_id not in self._reserved:
            self._join_idle(session_id)
            self.on_room()

    def _evict_unused(self, needed_by: str, room: int) -> None:
        while self.used_tokens > room and (tokens := self.prefixes.evict_unused(needed_by)):
            self.used_tokens -= tokens

    def _evict(self, session_id: str) -> None:
        self.evicted += self._drop(session_id) and session_id not in self.copies

    def _drop(self, session_id: str) -> bool:
        """Drop the KV of a session. Returns whether there was some."""
        tokens = self.held.get(session_id, 0)
        self.used_tokens += self.prefixes.change(session_id, tokens, 0)
        self._set_held(session_id, 0)
        self._leave_idle(session_id)
        return tokens > 0
