"""The longest times to recover that the matrix aims at, for all engines."""

from __future__ import annotations

from benchmarks.faults.cluster import KV_TIMEOUT_S, LEASE_S, PREFILL_S, PREFILL_S_PER_TOKEN
from benchmarks.faults.moments import HISTORY_TOKENS, INCREMENT_TOKENS
from router.settings import CALL_TIMEOUT_S
from workers.engines.supervised import STALL_FACTOR

CONTEXT_S = PREFILL_S + PREFILL_S_PER_TOKEN * (HISTORY_TOKENS + INCREMENT_TOKENS)
"""The computation of the victim's whole context by the modelled engine. SGLang takes about as long here."""

LOOK_S = 0.5
"""For whatever looks at something repeatedly. The guard of streams looks at the leases every 0.1 s."""

DEATH_AIM_S = 1.0
"""After a process has died, which broken connections show at once."""

SILENCE_AIM_S = LEASE_S + LOOK_S
"""After any fault that has no aim of its own."""

KV_STALLS_AIM_S = KV_TIMEOUT_S + 1.0

STOPPED_S = 2.5 * LEASE_S
"""How long a process hangs, where it is longer than its aim."""

WOKEN_AIM_S = STOPPED_S + 1.0
"""A process that only the liveness probe would notice, which the harness does not make: after it goes on."""


def hung_worker_aim_s(workers: int) -> float:
    """After a worker of a role with this many workers has stopped: until it counts as lost, and the computation.

    That is at the end of its lease, the next sign of life of another worker of its role (each publishes three times per
    lease) and the next look of the guard. The last of its role has no such other: it is asked, and does not answer.
    """
    asked_s = CALL_TIMEOUT_S + LOOK_S if workers == 1 else 0.0
    return round(4 / 3 * LEASE_S + 0.1 + asked_s + CONTEXT_S, 1)


def hung_for_s(workers: int) -> float:
    """How long such a worker is stopped: longer than until it counts as lost, because it goes on afterwards.

    It is less than the ten seconds after which Dynamo's discovery by files deletes an entry, the 3.3 s between two
    renewals included.
    """
    return max(STOPPED_S, hung_worker_aim_s(workers) + LOOK_S)


def hung_engine_aim_s(given_up_s: float) -> float:
    """After an engine hangs that its worker gives up after this time."""
    return given_up_s + 1.0


MODELLED_HANG_AIM_S = hung_engine_aim_s(STALL_FACTOR * CONTEXT_S)
"""The bound of an engine that computes a whole context of the victim."""
