"""What runs under the harness with each kind of engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.faults.cell import CellRunner
from benchmarks.faults.cluster import MODELLED, GraphKind, LiveGraph
from benchmarks.faults.fault import Fault
from benchmarks.faults.faults import FAULTS
from benchmarks.faults.moments import Moment


@dataclass(frozen=True)
class Setting:
    """What runs with one kind of engine."""

    faults: Mapping[str, Fault]
    moments: Sequence[Moment]
    kind: GraphKind
    runner: Callable[[LiveGraph], CellRunner]


def modelled() -> Setting:
    """The whole matrix, on the modelled engine."""
    return Setting(FAULTS, list(Moment), MODELLED, CellRunner)


def sglang() -> Setting:
    """A smaller one on SGLang, whose libraries are imported only for it."""
    from benchmarks.faults.sglang import MOMENTS, SGLANG_FAULTS, SglangRunner, sglang_graph

    return Setting({fault.name: fault for fault in SGLANG_FAULTS}, MOMENTS, sglang_graph(), SglangRunner)


SETTINGS = {"modelled": modelled, "sglang": sglang}
