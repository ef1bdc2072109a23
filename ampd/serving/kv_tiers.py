"""Where the KV of a round's prompt comes from: the device, the worker's KV store, a peer's KV store, or computation."""

from __future__ import annotations

from dataclasses import dataclass

from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism

TIERS = ("device", "store", "peer", "recomputed")
"""The names of the tiers in metrics and results, the nearest first."""


@dataclass(frozen=True, slots=True)
class Found:
    """How far the KV of a context reaches in each place, in tokens from the start of the context."""

    device_tokens: int = 0
    store_tokens: int = 0
    peer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tiers:
    """The parts of a prompt by the origin of their KV, in the order of the prompt. Together they are the whole prompt.

    Attributes:
        device_tokens: in the device's memory already.
        store_tokens: reloaded from the worker's own store.
        peer_tokens: read from a peer's store into the worker's own store, and reloaded from there.
        computed_tokens: at least the last token of the prompt, because its output is wanted.
    """

    device_tokens: int
    store_tokens: int
    peer_tokens: int
    computed_tokens: int

    @property
    def kept_tokens(self) -> int:
        """Tokens that need no computation."""
        return self.device_tokens + self.store_tokens + self.peer_tokens

    @property
    def reloaded_tokens(self) -> int:
        """Tokens that are copied from the worker's store to its device."""
        return self.store_tokens + self.peer_tokens

    def of_history(self, history_tokens: int) -> dict[str, int]:
        """The tokens of a history by tier, as metrics name the tiers; `recomputed`: their KV had existed before."""
        left, hits = history_tokens, {}
        parts = (self.device_tokens, self.store_tokens, self.peer_tokens, self.computed_tokens)
        for name, tokens in zip(TIERS, parts, strict=True):
            hits[name] = min(tokens, left)
            left -= hits[name]
        return hits

    def predicted_s(self, model: PerformanceModel, parallelism: Parallelism, peer: Parallelism) -> float:
        """Seconds until the prompt's KV is complete, on an idle worker.

        The read from the peer comes first. The reload and the computation then overlap layer by layer, so that the
        longer of the two counts.
        """
        read_s = model.kv_transfer_s(self.peer_tokens, peer, parallelism)
        computed_s = model.prefill_s(self.kept_tokens, self.computed_tokens, parallelism)
        return read_s + max(model.reload_s(self.reloaded_tokens, parallelism), computed_s)


def tiers_of(prompt_tokens: int, found: Found, kept_tokens: int) -> Tiers:
    """The parts of a prompt whose first `kept_tokens` are not computed, each from the nearest place that has it."""
    kept_tokens = max(
        min(kept_tokens, prompt_tokens - 1, max(found.device_tokens, found.store_tokens, found.peer_tokens)), 0
    )
    device = min(found.device_tokens, kept_tokens)
    store = max(min(found.store_tokens, kept_tokens) - device, 0)
    return Tiers(device, store, kept_tokens - device - store, prompt_tokens - kept_tokens)


def reading_pays(
    prompt_tokens: int,
    found: Found,
    model: PerformanceModel,
    parallelism: Parallelism,
    peer: Parallelism | None = None,
) -> bool:
    """Whether reading a peer's KV is predicted to be faster than computing it; the arguments are `fastest_tiers`'."""
    return fastest_tiers(prompt_tokens, found, model, parallelism, peer).peer_tokens > 0


def fastest_tiers(
    prompt_tokens: int,
    found: Found,
    model: PerformanceModel,
    parallelism: Parallelism,
    peer: Parallelism | None = None,
) -> Tiers:
    """The parts of a prompt with the lowest predicted time: compute, reload and compute, or read, reload and compute.

    Of equal times the one that computes least is chosen, because a pass holds up the decode batch.

    Args:
        prompt_tokens: above 0.
        parallelism: of the worker that needs the KV.
        peer: the parallelism of the peer; None: the worker's own.
    """
    own_tokens = max(found.device_tokens, found.store_tokens)
    ends = sorted({found.device_tokens, own_tokens, max(own_tokens, found.peer_tokens)}, reverse=True)
    return min(
        (tiers_of(prompt_tokens, found, end) for end in ends),
        key=lambda tiers: tiers.predicted_s(model, parallelism, peer or parallelism),
    )
