"""The entries of a setting: contestants on layouts of its workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ampd.errors import UserError
from benchmarks.policies.contest import Contestant
from benchmarks.policies.contestants import (
    COLOCATED,
    COLOCATED_OURS,
    OURS,
    OURS_AHEAD,
    OURS_STATIC,
    REFERENCES,
    RIVALS,
)
from benchmarks.policies.settings import Setting, paper_settings, real_settings
from planner.simulator.cluster import parse_groups

OURS_MIXED = replace(OURS_STATIC, label="ours, mixed workers", are_mixed=True)
OURS_FROM_EVEN = (
    OURS_AHEAD,
    replace(OURS, label="ours with predictive roles"),
    OURS_STATIC,
)
"""Ours as it starts, on the even split. The first one is compared with all others."""
_OUR_PARTS_ON_SPLITS = (OURS_STATIC, OURS_MIXED)
_OUR_PARTS_COLOCATED = (
    COLOCATED_OURS,
    replace(COLOCATED_OURS, label="co-located ours, least-kv", binding="least-kv"),
)

_DURATION_S = 150.0
_NO_PART = ("always-local", "random remote")
"""Worse than another one by construction: the first leaves prefill workers idle, the second knows no queues."""
_RIVALS = tuple(each for each in RIVALS if each.label not in _NO_PART and not each.is_fitted)
RIVALS_ON_SPLITS = tuple(each for each in _RIVALS if not each.is_unsplit)
RIVALS_UNSPLIT = (
    replace(COLOCATED, label="co-located chunked", slicing="itl-chunks"),
    replace(COLOCATED, label="co-located chunked, shortest first", slicing="itl-chunks", ordering="jct"),
    replace(COLOCATED, label="co-located chunked, kv-router", slicing="itl-chunks", binding="kv-router"),
    *REFERENCES,
    *(each for each in _RIVALS if each.is_unsplit),
)


@dataclass(frozen=True)
class Entry:
    """A contestant on a layout."""

    contestant: Contestant
    setting: Setting

    @property
    def label(self) -> str:
        """The contestant and its layout, as `deflection 1+3`."""
        if self.contestant.is_unsplit:
            return self.contestant.label
        prefill, decode = (_replicas(text)[0] for text in (self.setting.prefill, self.setting.decode))
        return f"{self.contestant.label} {prefill}+{decode}"


def all_settings() -> list[Setting]:
    """Settings with an even split of four workers first, then the paper's twelve and the recorded sessions."""
    four = [
        Setting("llama-3.1-8b", "h100", "tau-bench-airline", "2xTP1", "2xTP1", 0.3, 0.02),
        Setting("qwen3-32b", "h20", "toolbench", "2xTP2", "2xTP2", 0.35, 0.04),
        Setting("mixtral-8x7b", "h20", "dureader", "2xTP4", "2xTP4", 0.3, 0.05),
        Setting("llama-3.1-70b", "h200", "toolbench-answers", "2xTP2", "2xTP2", 3.0, 0.06),
        Setting("qwen3-32b", "h20", "gaia", "2xTP4", "2xTP4", 1.0, 0.035),
    ]
    two = [*real_settings(), *(setting for setting in paper_settings() if setting.trace != "gaia")]
    settings = dict.fromkeys(replace(each, duration_s=max(each.duration_s, _DURATION_S)) for each in four + two)
    return list(settings)


def settings_named(only: str | None) -> list[Setting]:
    """The settings whose names contain one of these comma-separated parts; None: all.

    Raises:
        UserError: there is none.
    """
    parts = [part.strip() for part in only.split(",")] if only else [""]
    chosen = [each for each in all_settings() if any(part in f"{each.name} {each.gpu}" for part in parts)]
    if not chosen:
        raise UserError(f"--only: no setting's name contains {only!r}")
    return chosen


def ours(setting: Setting) -> list[Entry]:
    """Ours on the even split."""
    return [Entry(contestant, setting) for contestant in OURS_FROM_EVEN]


def our_parts(setting: Setting) -> list[Entry]:
    """Every static layout of our own parts, the even split and co-location included."""
    return [*_unsplit(_OUR_PARTS_COLOCATED, setting), *_on_splits(_OUR_PARTS_ON_SPLITS, setting)]


def rivals(setting: Setting) -> list[Entry]:
    """Every rival on every split of the workers, and those whose workers are all alike."""
    return [*_unsplit(RIVALS_UNSPLIT, setting), *_on_splits(RIVALS_ON_SPLITS, setting)]


def splits(setting: Setting) -> Iterator[Setting]:
    """The setting with every split of its workers into prefill and decode workers, the even one first."""
    prefill, degree = _replicas(setting.prefill)
    decode, _ = _replicas(setting.decode)
    workers = prefill + decode
    counts = sorted(range(1, workers), key=lambda count: abs(count - prefill))
    for count in counts:
        yield replace(setting, prefill=f"{count}xTP{degree}", decode=f"{workers - count}xTP{degree}")


def _on_splits(contestants: Sequence[Contestant], setting: Setting) -> Iterator[Entry]:
    for contestant in contestants:
        for split in splits(setting):
            yield Entry(contestant, split)


def _unsplit(contestants: Sequence[Contestant], setting: Setting) -> Iterator[Entry]:
    for contestant in contestants:
        yield Entry(contestant, setting)


def _replicas(text: str) -> tuple[int, int]:
    """(replicas, degree) of a layout with equal workers."""
    ((count, theta),) = parse_groups(text, "layout")
    return count, theta.tp
