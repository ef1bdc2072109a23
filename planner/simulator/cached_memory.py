"""Device memory as a cache of the worker's KV store: running rounds, and sessions while there is room."""

from __future__ import annotations

from planner.simulator.kv_memory import KvMemory
from planner.simulator.kv_store import KvStore
from planner.simulator.session_kv import NO_PREFIXES
from planner.simulator.shared_prefixes import SessionPrefix


class CachedKvMemory(KvMemory):
    """KV memory in front of a store. Nothing but running rounds is protected on the device.

    A round's KV is written through to the store when the round ends here. `protect` protects the store's copy.
    """

    __slots__ = ("store",)

    def __init__(
        self,
        capacity_tokens: int,
        page_tokens: int,
        store: KvStore,
        prefixes: dict[str, SessionPrefix] = NO_PREFIXES,
    ) -> None:
        super().__init__(capacity_tokens, page_tokens, prefixes)
        self.store = store

    def held_tokens(self, session_id: str) -> int:
        """Tokens of a session on the device or in the store."""
        return max(self.device_tokens(session_id), self.store.held_tokens(session_id))

    def prefix_tokens(self, session_id: str) -> int:
        """The part of a session's context that is here with the prefix that it shares."""
        return max(self.prefixes.held_tokens(session_id), self.store.prefixes.held_tokens(session_id))

    def shared_prefixes(self) -> dict[str, int]:
        """Key -> tokens of the prefixes on the device or in the store that two sessions have used."""
        device, store = self.prefixes.published(), self.store.prefixes.published()
        return {key: max(device.get(key, 0), store.get(key, 0)) for key in device | store}

    def protect(self, session_id: str) -> None:
        """Protect the KV of a session in the store until `unprotect`; calls nest."""
        self.store.protect(session_id)

    def unprotect(self, session_id: str) -> None:
        """End a protection."""
        self.store.unprotect(session_id)

    def reserve(self, session_id: str, tokens: int) -> bool:
        """Make room on the device for a round of the session with `tokens` in total. False: it does not fit now."""
        has_room = super().reserve(session_id, tokens)
        if has_room:
            self.store.protect(session_id)
        return has_room

    def settle(self, session_id: str, context_tokens: int) -> None:
        """End a reservation; the full pages of the session's context are in the store, and stay on the device."""
        super().settle(session_id, context_tokens)
        self.store.write(session_id, context_tokens)
        self.store.unprotect(session_id)

    def release(self, session_id: str) -> None:
        """Drop the KV of a session that has ended."""
        self.store.release(session_id)
        super().release(session_id)

    def cut(self, session_id: str, tokens: int) -> None:
        """Drop the pages behind the first `tokens` of a session that does not run: its context was rewritten."""
        self.store.cut(session_id, tokens)
        super().cut(session_id, tokens)
