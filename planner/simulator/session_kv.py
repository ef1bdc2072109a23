"""Memory with KV of sessions: what the KV memory and the KV store of a worker have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict

from planner.simulator.shared_prefixes import ResidentPrefixes, SessionPrefix

NO_PREFIXES: dict[str, SessionPrefix] = {}


class SessionKv(ABC):
    """Tokens of KV by session, in whole pages, never more than fit. A prefix that sessions share is there once.

    Args:
        prefixes: session id -> the prefix that it shares.

    Attributes:
        held: session id -> tokens of its context with KV in this memory.
        prefixes: the shared prefixes here.
        evicted: number of times that a session of this worker lost all its KV.
        copies: sessions that other workers own. They were prefilled here, or this worker owned them before.
    """

    __slots__ = (
        "_copied_tokens",
        "_idle",
        "_idle_copies",
        "_protections",
        "capacity_tokens",
        "copies",
        "evicted",
        "held",
        "page_tokens",
        "prefixes",
        "used_tokens",
    )

    def __init__(
        self, capacity_tokens: int, page_tokens: int, prefixes: dict[str, SessionPrefix] = NO_PREFIXES
    ) -> None:
        self.capacity_tokens = capacity_tokens
        self.page_tokens = page_tokens
        self.prefixes = ResidentPrefixes(prefixes, page_tokens)
        self.held: dict[str, int] = {}
        self.used_tokens = 0
        self.evicted = 0
        self.copies: set[str] = set()
        self._copied_tokens = 0
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._idle_copies: OrderedDict[str, None] = OrderedDict()
        self._protections: dict[str, int] = {}

    @property
    def session_tokens(self) -> int:
        """Tokens that this worker's sessions use. Copies, and prefixes that no session needs, go before them."""
        return max(self.used_tokens - self.prefixes.unused_tokens - self._copied_tokens, 0)

    def held_tokens(self, session_id: str) -> int:
        """Tokens of a session's context with KV in this memory."""
        return max(self.held.get(session_id, 0), self.prefixes.held_tokens(session_id))

    def copy(self, session_id: str) -> None:
        """Another worker owns the session."""
        if session_id not in self.copies:
            self.copies.add(session_id)
            self._copied_tokens += self.held.get(session_id, 0)
            if session_id in self._idle:
                del self._idle[session_id]
                self._idle_copies[session_id] = None

    def own(self, session_id: str) -> None:
        """This worker owns the session."""
        if session_id in self.copies:
            self.copies.remove(session_id)
            self._copied_tokens -= self.held.get(session_id, 0)
            if session_id in self._idle_copies:
                del self._idle_copies[session_id]
                self._idle[session_id] = None

    def protect(self, session_id: str) -> None:
        """Protect the KV of a session until `unprotect`; calls nest."""
        self._protections[session_id] = self._protections.get(session_id, 0) + 1
        self._leave_idle(session_id)

    def unprotect(self, session_id: str) -> None:
        """End a protection; the session is then the most recently used."""
        left = self._protections[session_id] - 1
        if left:
            self._protections[session_id] = left
            return
        del self._protections[session_id]
        self._rest(session_id)

    def _pages(self, tokens: int) -> int:
        """The tokens of the full pages."""
        return tokens // self.page_tokens * self.page_tokens

    def _set_held(self, session_id: str, tokens: int) -> None:
        """Note that `tokens` tokens of the session are here."""
        if session_id in self.copies:
            self._copied_tokens += tokens - self.held.get(session_id, 0)
        if tokens:
            self.held[session_id] = tokens
        else:
            self.held.pop(session_id, None)

    def _join_idle(self, session_id: str) -> None:
        """The session's KV may be evicted, as that of the most recently used session of its kind."""
        idle = self._idle_copies if session_id in self.copies else self._idle
        if session_id in idle:
            idle.move_to_end(session_id)
        else:
            idle[session_id] = None

    def _leave_idle(self, session_id: str) -> None:
        """The session's KV must not be evicted."""
        # Without `pop`, because most sessions are not idle here, and an ordered dictionary pops slowly.
        if session_id in self._idle:
            del self._idle[session_id]
        if session_id in self._idle_copies:
            del self._idle_copies[session_id]

    def _first_idle(self) -> str | None:
        """The session whose KV goes first, which is a copy if there is one; None: nothing may go."""
        return next(iter(self._idle_copies or self._idle), None)

    @abstractmethod
    def _rest(self, session_id: str) -> None:
        """Nothing protects the session's KV any more, at least not by `protect`."""
