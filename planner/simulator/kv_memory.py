"""The KV memory of one worker: KV of sessions between rounds, reservations of running rounds, and evictions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from planner.simulator.shared_prefixes import ResidentPrefixes, SessionPrefix

_NONE: Mapping[str, SessionPrefix] = {}


class KvMemory:
    """Tokens of KV by session, in whole pages, never more than fit. A prefix that sessions share is there once.

    A session is *idle* between its rounds (its KV may be evicted, the least recently used first), *kept* while a round
    of it waits or is read by a peer, or *running* (its whole round's context is reserved).

    Args:
        capacity_tokens: 0: unlimited.
        prefixes: session id -> the prefix that it shares.

    Attributes:
        held: session id -> tokens of its context with KV in this memory.
        prefixes: the shared prefixes here.
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
        "prefixes",
        "used_tokens",
    )

    def __init__(self, capacity_tokens: int, page_tokens: int, prefixes: Mapping[str, SessionPrefix] = _NONE) -> None:
        self.capacity_tokens = capacity_tokens
        self.page_tokens = page_tokens
        self.prefixes = ResidentPrefixes(prefixes, page_tokens)
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

    @property
    def session_tokens(self) -> int:
        """Tokens that sessions use. A prefix that none of them needs goes when memory is needed."""
        return self.used_tokens - self.prefixes.unused_tokens

    def device_tokens(self, session_id: str) -> int:
        """Tokens of a session's context with KV in this memory."""
        return max(self.held.get(session_id, 0), self.prefixes.held_tokens(session_id))

    def held_tokens(self, session_id: str) -> int:
        """Tokens of a session's context with KV at this worker."""
        return self.device_tokens(session_id)

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
        room = self.capacity_tokens - self.prefixes.growth(session_id, self.held.get(session_id, 0), tokens)
        self._evict_unused(session_id, room)
        while self.used_tokens > room and self._idle:
            self._evict(next(iter(self._idle)))
        self._evict_unused(session_id, room)
        if self.used_tokens > room and not self._reserved:
            for other in [name for name in reversed(self._keepers) if name != session_id]:
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
        held = context_tokens // self.page_tokens * self.page_tokens
        self.prefixes.computed(session_id, held)
        self.used_tokens += self.prefixes.change(session_id, self._reserved.pop(session_id), held)
        self._set_held(session_id, held)
        self._rest(session_id)

    def release(self, session_id: str) -> None:
        """Drop the KV of a session that has ended."""
        if session_id not in self._reserved:
            self.used_tokens += self.prefixes.change(session_id, self.held.pop(session_id, 0), 0)
            self._idle.pop(session_id, None)
            self.on_room()

    def cut(self, session_id: str, tokens: int) -> None:
        """Drop the pages behind the first `tokens` of a session that does not run: its context was rewritten."""
        held = self.held.get(session_id, 0)
        kept = min(held, tokens // self.page_tokens * self.page_tokens)
        self.used_tokens += self.prefixes.change(session_id, held, kept)
        self._set_held(session_id, kept)
        if not kept:
            self._idle.pop(session_id, None)
        self.on_room()

    def _take(self, session_id: str, tokens: int) -> None:
        self.used_tokens += self.prefixes.change(session_id, self.held.get(session_id, 0), tokens)
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

    def _evict_unused(self, needed_by: str, room: int) -> None:
        while self.used_tokens > room and (tokens := self.prefixes.evict_unused(needed_by)):
            self.used_tokens -= tokens

    def _evict(self, session_id: str) -> None:
        tokens = self.held.pop(session_id, 0)
        self.used_tokens += self.prefixes.change(session_id, tokens, 0)
        self._idle.pop(session_id, None)
        self.evicted += bool(tokens) and session_id not in self.copies
