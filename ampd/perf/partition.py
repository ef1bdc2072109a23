"""Times on a part of a GPU: a prefill and a decode step beside each other, on shares of the multiprocessors (SMs)."""

from __future__ import annotations

BANDWIDTH_PER_SHARE = 3.0
"""Share of the memory's bandwidth that a small share of the multiprocessors reaches, as a multiple of that share.

DuetServe (arXiv 2511.04791) reports that 20 % of the multiprocessors reach about 60 % of the bandwidth. A line through
this point saturates at a third of them.
"""


def prefill_on_s(prefill_s: float, share: float) -> float:
    """Time of a prefill on a share of the GPU. It is bound by computation, so half of the GPU takes twice as long."""
    return prefill_s / share


def step_on_s(step_s: float, share: float) -> float:
    """Time of a decode step on a share of the GPU. It is bound by memory, so a third of the GPU is enough."""
    return step_s / min(BANDWIDTH_PER_SHARE * share, 1.0)
