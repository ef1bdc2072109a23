"""What a worker with a KV store reloads, and what it reads from a peer."""

from __future__ import annotations

from collections import Counter

from ampd.perf.model import PerformanceModel
from ampd.serving.kv_eviction import NextRounds
from ampd.serving.kv_tiers import Found, reading_pays, reloading_pays, tiers_of
from ampd.types import Parallelism, Slo
from planner.simulator.cached_memory import CachedKvMemory
from planner.simulator.request import SimulatedRequest


class Reloads:
    """The reloads and reads of one worker, and their figures.

    Args:
        model: the times of reloads.
        belief: the times that reloads and reads are decided with.
        next_rounds: learns from each round that is admitted.
        slo: of all rounds.

    Attributes:
        hit_tokens: tokens of prompts by tier: `device`, `store`, `peer`, `recomputed`.
        reload_s: seconds of all reloads.
    """

    __slots__ = ("_belief", "_memory", "_model", "_next_rounds", "_parallelism", "_slo", "hit_tokens", "reload_s")

    def __init__(
        self,
        memory: CachedKvMemory,
        model: PerformanceModel,
        belief: PerformanceModel,
        parallelism: Parallelism,
        next_rounds: NextRounds,
        slo: Slo,
    ) -> None:
        self._memory = memory
        self._model = model
        self._belief = belief
        self._parallelism = parallelism
        self._next_rounds = next_rounds
        self._slo = slo
        self.hit_tokens = Counter[str]()
        self.reload_s = 0.0

    def prefers_read(self, session_id: str, prompt_tokens: int, peer_tokens: int, peer: Parallelism) -> bool:
        """Whether a read of a peer's `peer_tokens` of the context is predicted to be faster than to compute them."""
        store_tokens = self._memory.store.held_tokens(session_id)
        return reading_pays(prompt_tokens, store_tokens, peer_tokens, self._belief, self._parallelism, peer)

    def admit(self, request: SimulatedRequest) -> None:
        """Reload what is in the store and not on the device, unless computing it is predicted to be faster.

        What was read from a peer is in the store by now.
        """
        self._next_rounds.begun(request.session_id, request.prompt_tokens, self._slo.ttft_s, request.output_tokens)
        here_tokens = request.cached_tokens + request.read_tokens
        device_tokens = min(self._memory.device_tokens(request.session_id), request.cached_tokens)
        if here_tokens > device_tokens and not reloading_pays(
            request.prompt_tokens, here_tokens, self._belief, self._parallelism
        ):
            request.cached_tokens, request.read_tokens, here_tokens = device_tokens, 0, device_tokens
        found = Found(device_tokens, request.cached_tokens, here_tokens)
        tiers = tiers_of(request.prompt_tokens, found, here_tokens)
        request.reload_s = self._model.reload_s(tiers.reloaded_tokens, self._parallelism)
        self.reload_s += request.reload_s
        if request.history_tokens:
            self.hit_tokens.update(tiers.hit_tokens(request.history_tokens, self._memory.page_tokens))
