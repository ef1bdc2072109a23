"""The KV memory of one worker: KV of sessions between rounds, reservations of running rounds, and evictions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class KvMemory:
    """Tokens of KV by session, in whole pages, never more than fit.

    A session is *idle* between its rounds (its KV may be evicted, the least recently used first), *kept* while a round
    of it waits or is read by a peer, or *running* (its whole round's context is reserved).

    Args:
        capacity_tokens: 0: unlimited.

    Attributes:
        held: session id -> tokens of its context with KV in this memory.
        evicted: number of times that a session of this worker lost its KV.
        copies: sessions that other workers own. They were prefilled here.
        on_room: called when a reservation that failed may succeed now.
    """

    __slots__ = (
        "_idle",
        "_keepers",
        "_reserved",
        "capacity_tokens",
        "copies",
        "evicted",
        "held",
        "on_room",
        "page_tokens",
        "used_tokens",
    )

    def __init__(self, capacity_tokens: int, page_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.page_tokens = page_tokens
        self.held: dict[str, int] = {}
        self.used_tokens = 0
        self.evicted = 0
        self.copies: set[str] = set()
        self.on_room: Callable[[], None] = lambda: None
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._keepers: dict[str, int] = {}
        self._reserved: dict[str, int] = {}

    @property
    def running_tokens(self) -> int:
        """Tokens that running rounds have reserved, their histories included."""
        return sum(self._reserved.values())

    def held_tokens(self, session_id: str) -> int:
        """Tokens of a session's context with KV at this worker."""
        return self.held.get(session_id, 0)

    def is_running(self, session_id: str) -> bool:
        """Whether a round of the session has a reservation."""
        return session_id in self._reserved

    def keep(self, session_id: str) -> None:
        """Protect the KV of a session until `unkeep`; calls nest."""
        self._keepers[session_id] = self._keepers.get(session_id, 0) + 1
        self._idle.pop(session_id, None)

    def unkeep(self, session_id: str) -> None:
        """End a protection; the session is then the most recently used."""
        left = self._keepers[session_id] - 1
        if left:
            self._keepers[session_id] = left
            return
        del self._keepers[session_id]
        self._rest(session_id)

    def reserve(self, session_id: str, tokens: int) -> bool:
        """Make room for a round of the session with `tokens` in total, the KV that it already holds included.

        Evicts idle sessions and, if no round runs, also sessions with waiting rounds. False: it does not fit now.
        """
        if not self.capacity_tokens:
            self._take(session_id, tokens)
            return True
        # The session's own KV must not be evicted to make room for it.
        self._idle.pop(session_id, None)
        room = self.capacity_tokens - tokens + self.held.get(session_id, 0)
        while self.used_tokens > room and self._idle:
            self._evict(next(iter(self._idle)))
        if self.used_tokens > room and not self._reserved:
            for other in [name for name in reversed(self._keepers) if name != session_id]:
                self._evict(other)
                if self.used_tokens <= room:
                    break
        if self.used_tokens > room:
            self._rest(session_id)
            return False
        self._take(session_id, tokens)
        return True

    def settle(self, session_id: str, context_tokens: int) -> None:
        """End a reservation; the full pages of the session's first `context_tokens` stay."""
        held = context_tokens // self.page_tokens * self.page_tokens
        self.used_tokens += held - self._reserved.pop(session_id)
        self._set_held(session_id, held)
        self._rest(session_id)

    def release(self, session_id: str) -> None:
        """Drop the KV of a session that has ended."""
        if session_id not in self._reserved:
            self.used_tokens -= self.held.pop(session_id, 0)
            self._idle.pop(session_id, None)
            self.on_room()

    def cut(self, session_id: str, tokens: int) -> None:
        """Drop the pages behind the first `tokens` of a session that does not run: its context was rewritten."""
        held = self.held.get(session_id, 0)
        kept = min(held, tokens // self.page_tokens * self.page_tokens)
        self.used_tokens += kept - held
        self._set_held(session_id, kept)
        if not kept:
            self._idle.pop(session_id, None)
        self.on_room()

    def _take(self, session_id: str, tokens: int) -> None:
        self.used_tokens += tokens - self.held.get(session_id, 0)
        self._reserved[session_id] = tokens
        self._idle.pop(session_id, None)

    def _set_held(self, session_id: str, tokens: int) -> None:
        if tokens:
            self.held[session_id] = tokens
        else:
            self.held.pop(session_id, None)

    def _rest(self, session_id: str) -> None:
        if session_id in self.held and session_id not in self._keepers and session_id not in self._reserved:
            self._idle[session_id] = None
            self._idle.move_to_end(session_id)
            self.on_room()

    def _evict(self, session_id: str) -> None:
        tokens = self.held.pop(session_id, 0)
        self.used_tokens -= tokens
        self._idle.pop(session_id, None)
        self.evicted += bool(tokens) and session_id not in self.copies
