"""What is soaked with each kind of engine: the graph, the faults and the load."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.faults import setting
from benchmarks.faults.faults import FAULTS
from benchmarks.faults.foreign_workers import FOREIGN_FAULTS
from benchmarks.faults.setting import Setting

SMALL_STORES = ("--kv-store-tokens", "32768", "--kv-capacity-tokens", "16384")
"""Stores that are full after a minute or two, so that the second half has no cache that still fills."""

_ENDS_ANY_WORKER = ("deadly-request", "rolling-restart", "rolling-weights")
SOAKED = {name: fault for name, fault in FAULTS.items() if name not in _ENDS_ANY_WORKER}
"""Faults that leave the first process of each kind alive. Churn replaces workers as a rolling restart does."""

_FOREIGN = [fault.name for fault in FOREIGN_FAULTS]
_WITH_ANY_ENGINE = (
    "kill-coordinator",
    "kill-frontend",
    "kill-behind-relay",
    "redis-killed",
    "redis-frozen",
    "duplicates",
    "client-leaves",
)


@dataclass(frozen=True)
class Soaked:
    """What a soak runs.

    Attributes:
        agents: that replay sessions. bound_s: a round that has no end after this time is lost.
    """

    setting: Setting
    agents: int = 4
    bound_s: float = 30.0


def modelled() -> Soaked:
    """All faults."""
    usual = setting.modelled()
    return Soaked(replace(usual, faults=SOAKED, kind=usual.kind.with_worker_flags(SMALL_STORES)))


def sglang() -> Soaked:
    """Two prefill and two decode workers, which read from each other over NIXL. All takes longer on a CPU."""
    from benchmarks.faults.sglang import sglang_graph

    usual = setting.sglang()
    # The answers of workers with other weights or another dtype cannot be learnt here.
    known = {name: fault for name, fault in usual.faults.items() if name not in (*_FOREIGN, *_ENDS_ANY_WORKER)}
    faults = {**known, **{name: FAULTS[name] for name in _WITH_ANY_ENGINE}}
    kind = sglang_graph(prefill=2, store_gib="0.1")
    return Soaked(replace(usual, faults=faults, kind=kind), agents=2, bound_s=120.0)


ENGINES = {"modelled": modelled, "sglang": sglang}
