"""Memory with KV of sessions: what the KV memory and the KV store of a worker have in common."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from planner.simulator.shared_prefixes import ResidentPrefixes, SessionPrefix

NO_PREFIXES: Mapping[str, SessionPrefix] = {}


class SessionMemory:
    """Tokens of KV by session, in whole pages, never more than fit. A prefix that sessions share is there once.

    Args:
        prefixes: session id -> the prefix that it shares.

    Attributes:
        held: session id -> tokens of its context with KV in this memory.
        prefixes: the shared prefixes here.
        evicted: number of times that a session of this worker lost all its KV.
        copies: sessions that other workers own. They were prefilled here.
    """

    __slots__ = (
        "_idle",
        "_keepers",
        "capacity_tokens",
        "copies",
        "evicted",
        "held",
        "page_tokens",
        "prefixes",
        "used_tokens",
    )

    def __init__(
        self, capacity_tokens: int, page_tokens: int, prefixes: Mapping[str, SessionPrefix] = NO_PREFIXES
    ) -> None:
        self.capacity_tokens = capacity_tokens
        self.page_tokens = page_tokens
        self.prefixes = ResidentPrefixes(prefixes, page_tokens)
        self.held: dict[str, int] = {}
        self.used_tokens = 0
        self.evicted = 0
        self.copies: set[str] = set()
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._keepers: dict[str, int] = {}

    @property
    def session_tokens(self) -> int:
        """Tokens that sessions use. A prefix that none of them needs goes when memory is needed."""
        return self.used_tokens - self.prefixes.unused_tokens

    def held_tokens(self, session_id: str) -> int:
        """Tokens of a session's context with KV in this memory."""
        return max(self.held.get(session_id, 0), self.prefixes.held_tokens(session_id))

    def keep(self, session_id: str) -> None:
        """Protect the KV of a session until `unkeep`; calls nest."""
        self._keepers[session_id] = self._keepers.get(session_id, 0) + 1
        self._leave_idle(session_id)

    def unkeep(self, session_id: str) -> None:
        """End a protection; the session is then the most recently used."""
        left = self._keepers[session_id] - 1
        if left:
            self._keepers[session_id] = left
            return
        del self._keepers[session_id]
        self._rest(session_id)

    def _pages(self, tokens: int) -> int:
        """The tokens of the full pages."""
        return tokens // self.page_tokens * self.page_tokens

    def _leave_idle(self, session_id: str) -> None:
        """The session's KV must not be evicted."""
        self._idle.pop(session_id, None)

    def _rest(self, session_id: str) -> None:
        """Nothing protects the session's KV any more, at least not by `keep`."""
        raise NotImplementedError
