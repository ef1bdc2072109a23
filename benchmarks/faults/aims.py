"""The longest times to recover that the matrix aims at, for all engines."""

from __future__ import annotations

from benchmarks.faults.cluster import KV_TIMEOUT_S, LEASE_S, PREFILL_S, PREFILL_S_PER_TOKEN
from benchmarks.faults.moments import HISTORY_TOKENS, INCREMENT_TOKENS
from workers.engines.supervised import STALL_FACTOR

CONTEXT_S = PREFILL_S + PREFILL_S_PER_TOKEN * (HISTORY_TOKENS + INCREMENT_TOKENS)
"""The computation of the victim's whole context by the modelled engine. SGLang takes about as long here."""

LOOK_S = 0.5
"""For whatever looks at something repeatedly."""

DEATH_AIM_S = 1.0
"""After a process has died, which broken connections show at once."""

SILENCE_AIM_S = LEASE_S + LOOK_S
"""After any fault that has no aim of its own."""

KV_STALLS_AIM_S = KV_TIMEOUT_S + 1.0

STOPPED_S = 2.5 * LEASE_S
"""How long a process hangs."""

WOKEN_AIM_S = STOPPED_S + 1.0
"""After a process that hung goes on."""


def hung_engine_aim_s(given_up_s: float) -> float:
    """After an engine hangs that its worker gives up after this time."""
    return given_up_s + 1.0


MODELLED_HANG_AIM_S = hung_engine_aim_s(STALL_FACTOR * CONTEXT_S)
"""The bound of an engine that computes a whole context of the victim."""
