"""The KV store of one worker in host memory: sessions by write-through, and which KV goes when memory is needed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from ampd.serving.kv_eviction import IDLE, SURPLUS, Evictable
from planner.simulator.session_kv import NO_PREFIXES, SessionKv
from planner.simulator.shared_prefixes import SessionPrefix


class KvStore(SessionKv):
    """The KV in host memory.

    What goes first is decided by `Evictable`. What remains of a session is always the beginning of its context.
    Protected sessions (they run, wait, or are read by a peer) lose nothing.

    Args:
        capacity_tokens: above 0.
        surplus: (tokens of a session's context, its id) -> tokens that may go from its end.

    Attributes:
        evicted_tokens: cause -> tokens.
    """

    __slots__ = ("_floors", "_spare", "_surplus", "evicted_tokens")

    def __init__(
        self,
        capacity_tokens: int,
        page_tokens: int,
        surplus: Callable[[int, str], int],
        prefixes: dict[str, SessionPrefix] = NO_PREFIXES,
    ) -> None:
        super().__init__(capacity_tokens, page_tokens, prefixes)
        self.evicted_tokens = Counter({SURPLUS: 0, IDLE: 0})
        self._surplus = surplus
        self._floors: dict[str, int] = {}
        self._spare: OrderedDict[str, None] = OrderedDict()  # idle sessions with more than their floor

    def write(self, session_id: str, context_tokens: int) -> None:
        """Store the full pages of the first `context_tokens` of a protected session, as far as they fit."""
        before = self.held.get(session_id, 0)
        context_tokens = self._pages(context_tokens)
        added = max(context_tokens - before, 0)
        growth = self.prefixes.growth(session_id, before, before + added)
        self._make_room(growth, session_id)
        room = self._pages(self.capacity_tokens - self.used_tokens)
        added = min(added, room + added - growth)
        if not before + added:
            return
        self.used_tokens += self.prefixes.change(session_id, before, before + added)
        self.prefixes.computed(session_id, before + added)
        self._set_held(session_id, before + added)
        floor = context_tokens - self._surplus(context_tokens, session_id)
        self._floors[session_id] = -(-floor // self.page_tokens) * self.page_tokens

    def cut(self, session_id: str, tokens: int) -> None:
        """Drop the pages behind the first `tokens` of a session, because its context was rewritten."""
        held = self.held.get(session_id, 0)
        self._shrink(session_id, min(held, self._pages(tokens)))

    def release(self, session_id: str) -> None:
        """Drop the KV of a session that has ended."""
        self._shrink(session_id, 0)

    def _make_room(self, tokens: int, needed_by: str) -> None:
        excess = self.used_tokens + tokens - self.capacity_tokens
        if excess <= 0:
            return
        evictable = Evictable(lambda _: self._evict_unused(needed_by), self._evict_surplus, self._evict_idle)
        while excess > 0:
            cause, dropped = evictable.evict(excess)
            if not dropped:
                return
            excess -= dropped
            self.evicted_tokens[cause] += dropped

    def _evict_unused(self, needed_by: str) -> int:
        tokens = self.prefixes.evict_unused(needed_by)
        self.used_tokens -= tokens
        return tokens

    def _evict_surplus(self, wanted_tokens: int) -> int:
        while self._spare:
            session_id = next(iter(self._spare))
            if dropped := self._evict(session_id, self.held[session_id] - self._floors[session_id], wanted_tokens):
                return dropped
        return 0

    def _evict_idle(self, wanted_tokens: int) -> int:
        while (session_id := self._first_idle()) is not None:
            if dropped := self._evict(session_id, self.held[session_id], wanted_tokens):
                return dropped
        return 0

    def _evict(self, session_id: str, most_tokens: int, wanted_tokens: int) -> int:
        """Drop the end of a session: up to `most_tokens`, and no more pages than are wanted. Returns what became free.

        That is less where the session shares a prefix.
        """
        tokens = min(most_tokens, -(-wanted_tokens // self.page_tokens) * self.page_tokens)
        left, used_tokens = self.held[session_id] - tokens, self.used_tokens
        self._shrink(session_id, left)
        self.evicted += not left and session_id not in self.copies
        return used_tokens - self.used_tokens

    def _shrink(self, session_id: str, tokens: int) -> None:
        self.used_tokens += self.prefixes.change(session_id, self.held.get(session_id, 0), tokens)
        self._set_held(session_id, tokens)
        if not tokens:
            self._floors.pop(session_id, None)
            self._leave_idle(session_id)
            return
        if tokens <= self._floors[session_id]:
            self._spare.pop(session_id, None)

    def _leave_idle(self, session_id: str) -> None:
        super()._leave_idle(session_id)
        self._spare.pop(session_id, None)

    def _rest(self, session_id: str) -> None:
        if session_id in self.held:
            self._join_idle(session_id)
            if self.held[session_id] > self._floors[session_id]:
                self._spare[session_id] = None
