"""Where the KV of a round's prompt comes from: the device, the worker's KV store, a peer's KV store, or computation."""

from __future__ import annotations

from dataclasses import dataclass

from ampd.errors import UserError
from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism, usable_tokens

TIERS = ("device", "store", "peer", "recomputed")
"""The names of the tiers in metrics and results, the nearest first."""


READ_FLOOR_S = 1.0
"""No read is given up before that, because connections to a new peer, and busy machines, take longer than predicted."""

_READ_FACTOR = 2.0
"""Reads share links, so that one may take a multiple of its predicted time."""


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
    def reused_tokens(self) -> int:
        """Tokens that need no computation."""
        return self.device_tokens + self.store_tokens + self.peer_tokens

    @property
    def reloaded_tokens(self) -> int:
        """Tokens that are copied from the worker's store to its device."""
        return self.store_tokens + self.peer_tokens

    def hit_tokens(self, history_tokens: int, page_tokens: int) -> dict[str, int]:
        """The prompt by tier, as metrics and results name the tiers.

        `recomputed` are tokens in full pages of the history (`history_tokens`): their KV had existed, and has to be
        computed again.
        """
        pages_tokens = max(history_tokens, 0) // page_tokens * page_tokens
        recomputed = max(pages_tokens - self.reused_tokens, 0)
        parts = (self.device_tokens, self.store_tokens, self.peer_tokens, recomputed)
        return dict(zip(TIERS, parts, strict=True))

    def predicted_s(self, model: PerformanceModel, parallelism: Parallelism, peer: Parallelism) -> float:
        """Seconds until the prompt's KV is complete, on an idle worker.

        The read from the peer comes first. The reload and the computation then overlap layer by layer, so that the
        longer of the two counts.
        """
        read_s = model.kv_transfer_s(self.peer_tokens, peer, parallelism)
        computed_s = model.prefill_s(self.reused_tokens, self.computed_tokens, parallelism)
        return read_s + max(model.reload_s(self.reloaded_tokens, parallelism), computed_s)


def reusable_tokens(prompt_tokens: int, held_tokens: int, page_tokens: int) -> int:
    """How much of a prompt an engine takes from what is held: full pages."""
    return usable_tokens(held_tokens, prompt_tokens) // page_tokens * page_tokens


def history_tokens(kept_tokens: int, held_tokens: int, page_tokens: int) -> int:
    """The tokens of a prompt whose KV had existed, wherever it is now. An eviction does not make it shorter.

    Args:
        kept_tokens: of the prompt, in the context of its session before. The last one may have no KV: the model has
            given it out, but not read it.
        held_tokens: of the prompt, that are known to be held: for this session, or for others.
    """
    return max(max(kept_tokens - 1, 0) // page_tokens * page_tokens, held_tokens)


def tiers_of(prompt_tokens: int, found: Found, reused_tokens: int) -> Tiers:
    """The parts of a prompt whose first `reused_tokens` are not computed, each from the nearest place that has it."""
    most_tokens = max(found.device_tokens, found.store_tokens, found.peer_tokens)
    reused_tokens = max(usable_tokens(min(reused_tokens, most_tokens), prompt_tokens), 0)
    device = min(found.device_tokens, reused_tokens)
    store = max(min(found.store_tokens, reused_tokens) - device, 0)
    return Tiers(device, store, reused_tokens - device - store, prompt_tokens - reused_tokens)


def reloading_pays(prompt_tokens: int, store_tokens: int, model: PerformanceModel, parallelism: Parallelism) -> bool:
    """Whether reloading a prompt's KV from the worker's store is predicted to be no slower than computing the prompt.

    It is for large models. With a small model on a slow link to the host, a short context is computed sooner. What is
    on the device does not count, because only the ranks of the engine know it. Of equal times the reload is chosen,
    because a computation holds up the decode batch. It is also chosen if the model lacks one of the two times.

    Args:
        store_tokens: of the prompt, from its start, in the store.
    """
    try:
        reload_s = model.reload_s(store_tokens, parallelism)
        return not reload_s or reload_s <= model.prefill_s(0, prompt_tokens, parallelism)
    except UserError:
        return True


def reading_pays(
    prompt_tokens: int,
    store_tokens: int,
    peer_tokens: int,
    model: PerformanceModel,
    parallelism: Parallelism,
    peer: Parallelism,
) -> bool:
    """Whether reading a peer's KV is predicted to be faster than computing it.

    Without the read, the worker reloads what its own store has, or computes all, whichever is faster. What is on the
    device does not count, because only the ranks of the engine know it. Of equal times the read is chosen, because a
    computation holds up the decode batch. It is also chosen if the model lacks the times of such a read, or of reloads,
    because reading is rarely the slower way.

    Args:
        prompt_tokens: above 0.
        store_tokens: of the prompt, from its start, in the worker's own store.
        peer_tokens: of the prompt, from its start, in the peer's store.
        parallelism: of the worker that needs the KV.
        peer: of the peer.
    """
    found = Found(store_tokens=store_tokens, peer_tokens=peer_tokens)
    with_read, *without_read = (tiers_of(prompt_tokens, found, end) for end in (prompt_tokens, store_tokens, 0))
    if not with_read.peer_tokens:
        return False
    try:
        read_s = with_read.predicted_s(model, parallelism, peer)
        return all(read_s <= tiers.predicted_s(model, parallelism, peer) for tiers in without_read)
    except UserError:
        return True


def longest_read_s(
    limit_s: float,
    store_tokens: int,
    peer_tokens: int,
    model: PerformanceModel,
    parallelism: Parallelism,
    peer: Parallelism,
) -> float:
    """How long a read of a peer's KV may take before it is given up, and the KV is computed.

    A read that has taken as long as the computation would have, and twice as long as predicted, has most likely
    stalled. If it is given up then, both ways together take at most about twice as long as the better one.

    Args:
        limit_s: the longest time in any case, also where the model lacks one of the two times.
        store_tokens: of the prompt, from its start, in the worker's own store.
        peer_tokens: of the prompt, from its start, in the peer's store.
        parallelism: of the worker that needs the KV.
        peer: of the peer.
    """
    missing = max(peer_tokens - store_tokens, 0)
    try:
        read_s = model.kv_transfer_s(missing, peer, parallelism)
        computed_s = model.prefill_s(store_tokens, missing, parallelism)
    except UserError:
        return limit_s
    return min(limit_s, max(READ_FLOOR_S, _READ_FACTOR * read_s, computed_s))
