"""The KV of one simulated worker: on its device, and in the store behind it where there is one.

Without a store, idle sessions live on the device. With one they live in the store, and the device is only a cache: a
round's KV is written through when the round ends, and nothing but running rounds is protected on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ampd.perf.corrections import LOAD, CorrectedModel
from ampd.perf.model import PerformanceModel
from ampd.serving.kv_eviction import IDLE, SURPLUS, Evictable, NextRounds
from ampd.serving.kv_tiers import Found, reading_pays, reloading_pays, tiers_of
from ampd.types import Parallelism, Slo
from planner.simulator.request import SimulatedRequest
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

    def cut(self, session_id: str, tokens: int) -> None:
        """Drop the pages behind the first `tokens` of a session that does not run: its context was rewritten."""
        self._shrink(session_id, min(self.held.get(session_id, 0), self._pages(tokens)))

    def release(self, session_id: str) -> None:
        """Drop the KV of a session that has ended."""
        self._shrink(session_id, 0)

    def _pages(self, tokens: int) -> int:
        """The tokens of the full pages."""
        return tokens // self.page_tokens * self.page_tokens

    def _hold(self, session_id: str, before: int, after: int) -> None:
        """The session now has `after` tokens here. `before`: what it took, with a reservation."""
        self.used_tokens += self.prefixes.change(session_id, before, after)
        if session_id in self.copies:
            self._copied_tokens += after - self.held.get(session_id, 0)
        if after:
            self.held[session_id] = after
        else:
            self.held.pop(session_id, None)

    def _shrink(self, session_id: str, tokens: int) -> None:
        """Keep no more than the first `tokens` of a session."""
        self._hold(session_id, self.held.get(session_id, 0), tokens)
        if not tokens:
            self._leave_idle(session_id)

    def _evict_unused(self, needed_by: str) -> int:
        """Drop a prefix that no session here needs; returns its tokens, 0 if none can go."""
        tokens = self.prefixes.evict_unused(needed_by)
        self.used_tokens -= tokens
        return tokens

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
        after = before + min(added, room + added - growth)
        if not after:
            return
        self._hold(session_id, before, after)
        self.prefixes.computed(session_id, after)
        floor = context_tokens - self._surplus(context_tokens, session_id)
        self._floors[session_id] = -(-floor // self.page_tokens) * self.page_tokens

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
        super()._shrink(session_id, tokens)
        if not tokens:
            self._floors.pop(session_id, None)
        elif tokens <= self._floors[session_id]:
            self._spare.pop(session_id, None)

    def _leave_idle(self, session_id: str) -> None:
        super()._leave_idle(session_id)
        self._spare.pop(session_id, None)

    def _rest(self, session_id: str) -> None:
        if session_id in self.held:
            self._join_idle(session_id)
            if self.held[session_id] > self._floors[session_id]:
                self._spare[session_id] = None


class KvMemory(SessionKv):
    """The KV on the device, with the store behind it if the worker has one.

    A session is *running* (its whole round's context is reserved on the device), *protected* while a round of it waits
    or is read by a peer, or *idle* between its rounds: its KV may be evicted, the least recently used first. `protect`
    is about the memory where idle sessions live.

    Args:
        capacity_tokens: of the device; 0: unlimited.

    Attributes:
        on_room: called when a reservation that failed may succeed now.
    """

    def __init__(
        self,
        capacity_tokens: int,
        page_tokens: int,
        prefixes: dict[str, SessionPrefix] = NO_PREFIXES,
        store: KvStore | None = None,
    ) -> None:
        super().__init__(capacity_tokens, page_tokens, prefixes)
        self.store = store
        self.on_room: Callable[[], None] = lambda: None
        self._reserved: dict[str, int] = {}

    @property
    def resident(self) -> SessionKv:
        """Where idle sessions live."""
        return self if self.store is None else self.store

    @property
    def running_tokens(self) -> int:
        """Tokens that running rounds have reserved, their histories included."""
        return sum(self._reserved.values())

    def device_tokens(self, session_id: str) -> int:
        """Tokens of a session's context with KV on the device."""
        return super().held_tokens(session_id)

    def held_tokens(self, session_id: str) -> int:
        """Tokens of a session on the device or in the store."""
        device_tokens = super().held_tokens(session_id)
        return device_tokens if self.store is None else max(device_tokens, self.store.held_tokens(session_id))

    def prefix_tokens(self, session_id: str) -> int:
        """The part of a session's context that is here with the prefix that it shares."""
        return max(self.prefixes.held_tokens(session_id), self.resident.prefixes.held_tokens(session_id))

    def shared_prefixes(self) -> dict[str, int]:
        """Key -> tokens of the prefixes on the device or in the store that two sessions have used."""
        device = self.prefixes.published()
        if self.store is None:
            return device
        store = self.store.prefixes.published()
        return {key: max(device.get(key, 0), store.get(key, 0)) for key in device | store}

    def computed(self, session_id: str, tokens: int) -> None:
        """The KV of the first `tokens` of a running round is here: other sessions find what they share of it."""
        self.prefixes.computed(session_id, tokens)

    def is_running(self, session_id: str) -> bool:
        """Whether a round of the session has a reservation."""
        return session_id in self._reserved

    def protect(self, session_id: str) -> None:
        if self.store is None:
            super().protect(session_id)
        else:
            self.store.protect(session_id)

    def unprotect(self, session_id: str) -> None:
        if self.store is None:
            super().unprotect(session_id)
        else:
            self.store.unprotect(session_id)

    def reserve(self, session_id: str, tokens: int) -> bool:
        """Make room for a round of the session with `tokens` in total, the KV that the device already holds included.

        Evicts idle sessions and, if no round runs, also sessions with waiting rounds. False: it does not fit now.
        """
        if self.capacity_tokens and not self._has_room(session_id, tokens):
            self._rest(session_id)
            return False
        self.used_tokens += self.prefixes.change(session_id, self.held.get(session_id, 0), tokens)
        self._reserved[session_id] = tokens
        self._leave_idle(session_id)
        if self.store is not None:
            self.store.protect(session_id)
        return True

    def settle(self, session_id: str, context_tokens: int) -> None:
        """End a reservation. The full pages of the session's first `context_tokens` stay, and are in the store too."""
        held = self._pages(context_tokens)
        self.prefixes.computed(session_id, held)
        self._hold(session_id, self._reserved.pop(session_id), held)
        self._rest(session_id)
        if self.store is not None:
            self.store.write(session_id, context_tokens)
            self.store.unprotect(session_id)

    def release(self, session_id: str) -> None:
        if self.store is not None:
            self.store.release(session_id)
        if session_id not in self._reserved:
            super().release(session_id)
            self.on_room()

    def cut(self, session_id: str, tokens: int) -> None:
        if self.store is not None:
            self.store.cut(session_id, tokens)
        super().cut(session_id, tokens)
        self.on_room()

    def _has_room(self, session_id: str, tokens: int) -> bool:
        """Evict what has to go for a round of the session; whether that is enough."""
        # The session's own KV must not be evicted to make room for it.
        self._leave_idle(session_id)
        room = self._room_without(session_id, tokens)
        self._evict_unused_down_to(room, session_id)
        while self.used_tokens > room and (first := self._first_idle()) is not None:
            self._evict(first)
        self._evict_unused_down_to(room, session_id)
        if self.used_tokens > room and not self._reserved:
            for other in [name for name in reversed(self._protections) if name != session_id]:
                self._evict(other)
                if self.used_tokens <= room:
                    return True
            # A session that has rewritten its context, or shares less of the prefix than others did, needs less of it,
            # or nothing, than is here.
            self.used_tokens -= self.prefixes.drop(session_id)
            room = self._room_without(session_id, tokens)
        return self.used_tokens <= room

    def _room_without(self, session_id: str, tokens: int) -> int:
        """How much of the device may be used before the session gets `tokens`."""
        return self.capacity_tokens - self.prefixes.growth(session_id, self.held.get(session_id, 0), tokens)

    def _rest(self, session_id: str) -> None:
        if session_id in self.held and session_id not in self._protections and session_id not in self._reserved:
            self._join_idle(session_id)
            self.on_room()

    def _evict_unused_down_to(self, room: int, needed_by: str) -> None:
        while self.used_tokens > room and self._evict_unused(needed_by):
            pass

    def _evict(self, session_id: str) -> None:
        self.evicted += session_id in self.held and session_id not in self.copies
        self._shrink(session_id, 0)


@dataclass(slots=True, eq=False)
class Reloads:
    """The reloads and reads of one worker, and their figures.

    Attributes:
        model: the times of reloads.
        belief: the times that reloads and reads are decided with.
        next_rounds: learns from each round that is admitted.
        slo: of all rounds.
        hit_tokens: tokens of prompts by tier: `device`, `store`, `peer`, `recomputed`.
        reload_s: seconds of all reloads.
    """

    memory: KvMemory
    model: PerformanceModel
    belief: PerformanceModel
    parallelism: Parallelism
    next_rounds: NextRounds
    slo: Slo
    hit_tokens: Counter[str] = field(default_factory=Counter)
    reload_s: float = 0.0

    def prefers_read(self, session_id: str, prompt_tokens: int, peer_tokens: int, peer: Parallelism) -> bool:
        """Whether a read of a peer's `peer_tokens` of the context is predicted to be faster than to compute them."""
        store_tokens = self.memory.resident.held_tokens(session_id)
        return reading_pays(prompt_tokens, store_tokens, peer_tokens, self.belief, self.parallelism, peer)

    def admit(self, request: SimulatedRequest) -> None:
        """Reload what is in the store and not on the device, unless computing it is predicted to be faster.

        What was read from a peer is in the store by now.
        """
        self.next_rounds.begun(request.session_id, request.prompt_tokens, self.slo.ttft_s, request.output_tokens)
        here_tokens = request.cached_tokens + request.read_tokens
        device_tokens = min(self.memory.device_tokens(request.session_id), request.cached_tokens)
        if here_tokens > device_tokens and not reloading_pays(
            request.prompt_tokens, here_tokens, self.belief, self.parallelism
        ):
            request.cached_tokens, request.read_tokens, here_tokens = device_tokens, 0, device_tokens
        found = Found(device_tokens, request.cached_tokens, here_tokens)
        tiers = tiers_of(request.prompt_tokens, found, here_tokens)
        request.reload_s = self.model.reload_s(tiers.reloaded_tokens, self.parallelism)
        if isinstance(self.belief, CorrectedModel):
            predicted_s = self.belief.reload_s(tiers.reloaded_tokens, self.parallelism)
            self.belief.measured(LOAD, predicted_s, request.reload_s)
        self.reload_s += request.reload_s
        if request.history_tokens:
            self.hit_tokens.update(tiers.hit_tokens(request.history_tokens, self.memory.page_tokens))
