"""What has to be known of a setting before the contest: a rate to begin with, the planner's layout, a fitted table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ampd.documents import replacing
from ampd.policies import defaults
from ampd.types import Slo
from benchmarks.paper_plan.curve_cache import CurveCache
from benchmarks.paper_plan.search import checked_layouts
from benchmarks.policies.contest import TARGET, measure, run
from benchmarks.policies.contestants import ALWAYS_REMOTE
from benchmarks.policies.settings import Setting
from benchmarks.rate_search import RateSearch
from benchmarks.routing_table.case import FitCase
from benchmarks.routing_table.search import fit_table
from benchmarks.routing_table.table_file import write_table
from planner.layout.layout import PlanCase, Replicas
from planner.simulator.options import SimulationOptions

SEED = 7_001
"""Of everything that is prepared; the contest's seeds are other ones, so nothing is fitted to what it is judged by."""
_DEGREES = (1, 2, 4, 8)
_SESSIONS = 300
_TABLE_LOADS = (0.9, 1.3)
"""A table is fitted at these multiples of the rate that `always-remote` carries."""
_TABLE_SESSIONS = 120
_TABLE_STEPS = 60


@dataclass(frozen=True)
class Prepared:
    """Answers of earlier runs in a folder. They depend on the simulator: delete the folder when that has changed."""

    folder: Path

    def reference_rate(self, setting: Setting) -> float:
        """The goodput of rounds of `always-remote`, at least a hundredth."""
        return float(self._kept("rate", setting, lambda: max(_reference_rate(setting), 0.01)))

    def planned(self, setting: Setting) -> Setting:
        """The setting on the planner's best layout of as many GPUs, at the rate of `reference_rate`."""
        rate = self.reference_rate(setting)
        found = self._kept("layout", setting, lambda: _planned(setting, rate, self.folder / "curves"))
        return replace(setting, prefill=found["prefill"], decode=found["decode"])

    def table(self, setting: Setting) -> Path:
        """The file of a routing table that was fitted to the setting."""
        rate = self.reference_rate(setting)
        path = self._path("table", setting)
        if not path.exists():
            table = fit_table(_fit_case(setting, rate), jobs=1).table
            with replacing(path) as partial:
                write_table(table, partial)
        return path

    def _kept(self, what: str, setting: Setting, make: Callable[[], Any]) -> Any:
        path = self._path(what, setting)
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        made = make()
        with replacing(path) as partial:
            partial.write_text(json.dumps(made) + "\n", encoding="utf-8")
        return made

    def _path(self, what: str, setting: Setting) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(repr((setting, SEED)).encode()).hexdigest()[:12]
        return self.folder / f"{what}-{setting.model}-{setting.trace}-{digest}.json"


def _reference_rate(setting: Setting) -> float:
    search = RateSearch(lambda rate: measure(setting, *run(setting, ALWAYS_REMOTE, rate, SEED)))
    return search.highest(TARGET, "rounds", 1.0)


def _planned(setting: Setting, rate: float, curves: Path) -> dict[str, str]:
    model = setting.performance_model()
    sessions = setting.workload(_SESSIONS, SEED)
    longest = max(session.max_context_tokens for session in sessions)
    capacities = {
        theta.tp: model.kv_capacity_tokens(theta) or 0
        for theta in model.parallelisms
        if theta.tp in _DEGREES and theta.tp < setting.gpus
    }
    checked = checked_layouts(
        PlanCase(
            sessions=sessions,
            rate=rate,
            slo=Slo(setting.ttft_s, setting.itl_s),
            model=model,
            kv_capacity_tokens={tp: tokens for tp, tokens in capacities.items() if not 0 < tokens < longest},
            gpus=setting.gpus,
            routing=defaults.ROUTING,
            ordering=defaults.ORDERING,
            slicing=defaults.SLICING,
            pools="static",
            options=SimulationOptions(seed=SEED),
        ),
        top=3,
        cache=CurveCache(curves),
        jobs=1,
    )
    layout = checked[0].choice.layout
    return {"prefill": _text(layout.prefill), "decode": _text(layout.decode)}


def _text(replicas: Replicas) -> str:
    return ",".join(f"{count}xTP{degree}" for degree, count in replicas)


def _fit_case(setting: Setting, rate: float) -> FitCase:
    return FitCase(
        sessions=setting.workload(_SESSIONS, SEED),
        cluster=setting.cluster(),
        model=setting.performance_model(),
        slo=setting.slo,
        rates=tuple(load * rate for load in _TABLE_LOADS),
        limit=_TABLE_SESSIONS,
        ordering="fcfs",
        options=SimulationOptions(seed=SEED),
        steps=_TABLE_STEPS,
    )
