"""What is compared: ways to choose roles, static layouts, and settings that differ in kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.best_layouts.entries import Entry, splits
from benchmarks.policies.contest import USUAL, Condition
from benchmarks.policies.contestants import COLOCATED_OURS, OURS, OURS_AHEAD, OURS_STATIC
from benchmarks.policies.settings import Setting


@dataclass(frozen=True)
class Case:
    """A setting with an even split of its workers. `near`: the rate at which the search for its capacity begins."""

    setting: Setting
    near: float

    @property
    def name(self) -> str:
        """With the targets, because some settings differ in these only."""
        return f"{self.setting.name} {self.setting.gpu}, {self.setting.ttft_s:g} s, {1e3 * self.setting.itl_s:g} ms"


CASES = (
    Case(Setting("qwen3-32b", "h100", "coding-agents", "2xTP2", "2xTP2", 6.0, 0.04, 600.0), 0.09),
    Case(Setting("llama-3.1-8b", "h100", "tau-bench-airline", "1xTP1", "1xTP1", 0.3, 0.02, 40.0), 12.0),
    Case(Setting("qwen3-32b", "h20", "toolbench", "2xTP2", "2xTP2", 0.35, 0.04, 60.0), 10.0),
    Case(Setting("mixtral-8x7b", "h20", "dureader", "2xTP4", "2xTP4", 0.3, 0.05, 45.0), 12.0),
    Case(Setting("llama-3.1-70b", "h200", "toolbench-answers", "2xTP2", "2xTP2", 3.0, 0.06, 60.0), 6.0),
    Case(Setting("qwen3-32b", "h20", "gaia", "2xTP4", "2xTP4", 1.0, 0.035, 100.0), 1.8),
    Case(Setting("llama-3.1-8b", "h20", "hotpotqa", "4xTP1", "4xTP1", 0.4, 0.02, 30.0), 20.0),
    Case(Setting("llama-3.1-70b", "h200", "coding-agents", "2xTP4", "2xTP4", 12.0, 0.06, 400.0), 0.2),
)
"""Traces, models, GPUs, numbers of workers, tight and loose targets."""

START = replace(OURS_STATIC, label="fixed")
PREDICTIVE = replace(OURS, label="predictive")
AHEAD = replace(OURS_AHEAD, label="look-ahead")
MOVING = {each: replace(each, label=f"{each.label}, moves", moves="any") for each in (START, PREDICTIVE, AHEAD)}
WAYS = (START, MOVING[START], PREDICTIVE, MOVING[PREDICTIVE], AHEAD, MOVING[AHEAD])
"""How roles are chosen from the even split on. With `moves`, any session may move between two rounds."""
_SAFE = (START, AHEAD, MOVING[AHEAD])
"""Those that are also tried with a wrong performance model."""
_OTHER_SHARES = (0.25, 0.75)
"""Other splits than the even one: these shares of the workers prefill."""


@dataclass(frozen=True)
class Circumstance:
    """A load, as a multiple of what the even split carries, and what is unusual."""

    load: float
    condition: Condition = USUAL

    @property
    def is_usual(self) -> bool:
        return self.condition == USUAL


WRONG_MODELS = tuple(Circumstance(1.0, Condition(f"times x{belief}", belief=belief)) for belief in ("0.7", "1.3"))
LOADS = (Circumstance(1.0), Circumstance(1.15), Circumstance(0.85))


def ways(case: Case, circumstance: Circumstance) -> Mapping[str, Entry]:
    """The ways to choose roles, by their names."""
    return {each.label: Entry(each, case.setting) for each in (WAYS if circumstance.is_usual else _SAFE)}


def static_layouts(case: Case, circumstance: Circumstance) -> Mapping[str, Entry]:
    """Co-located serving and other splits of the workers, by their names."""
    if not circumstance.is_usual:
        return {}
    layouts = {"co-located": Entry(COLOCATED_OURS, case.setting)}
    for split in splits(case.setting):
        cluster = split.cluster()
        prefill, decode = (sum(group.replicas for group in groups) for groups in (cluster.prefill, cluster.decode))
        if prefill / (prefill + decode) in _OTHER_SHARES:
            layouts[f"{prefill}+{decode}"] = Entry(START, split)
    return layouts
