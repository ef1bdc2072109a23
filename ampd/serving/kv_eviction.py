"""T-LRU (arXiv 2510.15152): how much of an idle session's context can go before its next round misses its target."""

from __future__ import annotations

from bisect import bisect_right

from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism

TARGET_SHARE = 0.5
"""The share of the TTFT target that the prefill of a next round may take. The rest is for the wait in queues."""


def surplus(
    context_tokens: int,
    next_increment_tokens: int,
    target_s: float,
    model: PerformanceModel,
    parallelism: Parallelism,
) -> int:
    """The most tokens that can be dropped from the end of a context without harm to the next round.

    The next round computes them again together with its increment, and still meets its target.

    Args:
        context_tokens: length of the session's context now.
        next_increment_tokens: tokens that the next round is expected to add before its first output token.
        target_s: what the prefill may take. It is the TTFT target less the time that the round waits in queues.
        model: its prefill time must not fall when more of the same context has to be computed.

    Returns:
        Tokens from 0 to `context_tokens`. 0 if the round misses the target with its whole context in place too.
    """

    def prefill_s(dropped_tokens: int) -> float:
        kept_tokens = context_tokens - dropped_tokens
        return model.prefill_s(kept_tokens, dropped_tokens + next_increment_tokens, parallelism)

    return max(0, bisect_right(range(context_tokens + 1), target_s, key=prefill_s) - 1)
