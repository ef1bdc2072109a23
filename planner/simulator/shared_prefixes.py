"""Prefixes that several sessions share, in one memory of a simulated worker: their KV is there once."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from ampd.serving.shared_prefixes import MOST_PUBLISHED, PrefixUsers


class SessionPrefix(NamedTuple):
    """The beginning of a session's context that other sessions have too: its key, and its tokens in full pages."""

    key: str
    tokens: int


class _Resident:
    """A prefix in a memory.

    Attributes:
        computed_tokens: tokens whose KV is here, so that other sessions find it.
        members: session id -> tokens of the prefix that are a part of what the session has here.
        users: the sessions that have used it here.
    """

    def __init__(self) -> None:
        self.computed_tokens = 0
        self.members: dict[str, int] = {}
        self.users = PrefixUsers()

    @property
    def tokens(self) -> int:
        """Memory that it takes."""
        return max(self.computed_tokens, max(self.members.values(), default=0))


class ResidentPrefixes:
    """The shared prefixes in one memory. They outlive their sessions until the memory is needed.

    Args:
        prefixes: session id -> its prefix, of all sessions that have one.
    """

    def __init__(self, prefixes: dict[str, SessionPrefix], page_tokens: int) -> None:
        self._prefixes = prefixes
        self._page_tokens = page_tokens
        self._residents: OrderedDict[str, _Resident] = OrderedDict()

    def held_tokens(self, session_id: str) -> int:
        """How much of a session's context is here because of its prefix."""
        prefix = self._prefixes.get(session_id)
        resident = self._residents.get(prefix.key) if prefix else None
        return min(resident.computed_tokens, prefix.tokens) if prefix and resident else 0

    def growth(self, session_id: str, before: int, after: int) -> int:
        """Memory that a session needs to go from `before` to no fewer tokens."""
        prefix = self._prefixes.get(session_id)
        if prefix is None:
            return after - before
        resident = self._residents.get(prefix.key)
        tokens = resident.tokens if resident else 0
        shared = min(after, prefix.tokens)
        return after - before - shared + min(before, prefix.tokens) + max(shared - tokens, 0)

    def change(self, session_id: str, before: int, after: int) -> int:
        """A session now has `after` tokens here, and had `before`; returns how much more memory that takes."""
        prefix = self._prefixes.get(session_id)
        if prefix is None:
            return after - before
        resident = self._residents.setdefault(prefix.key, _Resident())
        tokens = resident.tokens
        was_shared, shared = min(before, prefix.tokens), min(after, prefix.tokens)
        if shared:
            resident.members[session_id] = shared
            resident.users.note(session_id, shared)
            self._residents.move_to_end(prefix.key)
        else:
            resident.members.pop(session_id, None)
        return after - before - shared + was_shared + resident.tokens - tokens

    def computed(self, session_id: str, tokens: int) -> None:
        """The KV of the first `tokens` of a session's context, which has room here, is there."""
        prefix = self._prefixes.get(session_id)
        resident = self._residents.get(prefix.key) if prefix else None
        if resident is not None:
            whole = min(tokens, resident.members.get(session_id, 0)) // self._page_tokens * self._page_tokens
            resident.computed_tokens = max(resident.computed_tokens, whole)

    def evict_unused(self, needed_by: str) -> int:
        """Drop the prefix that no session has used for longest; returns its tokens. 0: none can go.

        Args:
            needed_by: the session that the room is for. Its own prefix stays.
        """
        own = self._prefixes.get(needed_by)
        for key, resident in self._residents.items():
            if not resident.members and resident.computed_tokens and (own is None or key != own.key):
                del self._residents[key]
                return resident.computed_tokens
        return 0

    def drop(self, session_id: str) -> int:
        """Drop what no session here uses of a session's prefix; returns those tokens."""
        prefix = self._prefixes.get(session_id)
        resident = self._residents.get(prefix.key) if prefix else None
        if prefix is None or resident is None:
            return 0
        before = resident.tokens
        resident.computed_tokens = min(resident.computed_tokens, max(resident.members.values(), default=0))
        if not resident.members:
            del self._residents[prefix.key]
        return before - resident.tokens

    @property
    def unused_tokens(self) -> int:
        """Memory of prefixes that no session here needs."""
        if not self._residents:
            return 0
        return sum([resident.tokens for resident in self._residents.values() if not resident.members])

    def published(self) -> dict[str, int]:
        """Key -> tokens of those that two sessions have used here, as many as a view lists."""
        if not self._residents:
            return {}
        found = {
            key: resident.computed_tokens
            for key, resident in self._residents.items()
            if resident.computed_tokens and resident.users.is_shared
        }
        return found if len(found) <= MOST_PUBLISHED else dict(list(found.items())[-MOST_PUBLISHED:])
