"""The entries of a setting: contestants on layouts of its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ampd.errors import UserError
from benchmarks.policies.contest import Contestant
from benchmarks.policies.contestants import (
    COLOCATED,
    COLOCATED_OURS,
    OURS,
    OURS_STATIC,
    REFERENCES,
    RIVALS,
)
from benchmarks.policies.settings import Setting, paper_settings, real_settings
from planner.simulator.options import parse_groups

OURS_FROM_EVEN = (OURS, OURS_STATIC)
"""Ours as it starts, on the even split. The first one is compared with all others."""
_OUR_PARTS_ON_SPLITS = (OURS_STATIC, replace(OURS_STATIC, label="ours, mixed workers", are_mixed=True))
_OUR_PARTS_COLOCATED = (
    COLOCATED_OURS,
    replace(COLOCATED_OURS, label="co-located ours, least-kv", binding="least-kv"),
)

_DURATION_S = 150.0
_NO_PART = ("always-local", "random remote")
"""Worse than another one by construction: the first leaves prefill workers idle, the second knows no queues."""
_RIVALS = tuple(each for each in RIVALS if each.label not in _NO_PART and not each.is_fitted)
_MAY_SHARE = ("deflection", "deflection window 32", "arrow", "threshold", "ampd", "ampd window 32", "first-remote")
"""Policies of split workers that prefill where rounds decode, so that chunks that fit beside a step may serve them."""
_TAICHI_CHUNKS = ((2048, 256), (1024, 512), (1024, 128), (512, 256), (512, 96), (256, 64))
"""Tokens of a prefill-heavy and of a decode-heavy chunk: TaiChi's source searches them for a workload."""
_RIVALS_ON_SPLITS = tuple(each for each in _RIVALS if not each.is_unsplit)
_COLOCATED_CHUNKED = (
    replace(COLOCATED, label="co-located chunked", slicing="itl-chunks"),
    replace(COLOCATED, label="co-located chunked, shortest first", slicing="itl-chunks", ordering="jct"),
    replace(COLOCATED, label="co-located chunked, kv-router", slicing="itl-chunks", binding="kv-router"),
)
_RIVALS_UNSPLIT = (*_COLOCATED_CHUNKED, *REFERENCES, *(each for each in _RIVALS if each.is_unsplit))


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
        prefill, decode = _degrees(self.setting.prefill), _degrees(self.setting.decode)
        if len({*prefill, *decode}) == 1:
            return f"{self.contestant.label} {len(prefill)}+{len(decode)}"
        return f"{self.contestant.label} {self.setting.prefill} + {self.setting.decode}"


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


def planned_settings() -> list[Setting]:
    """Workers of unequal degrees, as `ampd plan --use-all` divides eight GPUs. Ours starts from the plan's layout."""
    return [
        Setting("llama-3.1-8b", "l40s", "tau-bench-airline", "2xTP1", "1xTP2+1xTP4", 0.5, 0.05, _DURATION_S),
        Setting("qwen3-32b", "h20", "tau-bench-airline", "1xTP2+1xTP4", "1xTP2", 0.5, 0.04, _DURATION_S),
        Setting("qwen3-32b", "h100", "toolbench", "4xTP1", "1xTP4", 0.5, 0.04, _DURATION_S),
        Setting("llama-3.1-70b", "h200", "dureader", "2xTP2", "1xTP4", 5.0, 0.05, _DURATION_S),
    ]


def settings_named(only: str | None) -> list[Setting]:
    """The settings whose names contain one of these comma-separated parts; None: all, without the planned ones.

    Raises:
        UserError: there is none.
    """
    if only is None:
        return all_settings()
    parts = [part.strip() for part in only.split(",")]
    every = [*all_settings(), *planned_settings()]
    chosen = [each for each in every if any(part in f"{each.name} {each.gpu}" for part in parts)]
    if not chosen:
        raise UserError(f"--only: no setting's name contains {only!r}")
    return chosen


def ours(setting: Setting) -> list[Entry]:
    """Ours on the even split."""
    return _unsplit(OURS_FROM_EVEN, setting)


def our_parts(setting: Setting) -> list[Entry]:
    """Every static layout of our own parts, the even split and co-location included."""
    return [*_unsplit(_OUR_PARTS_COLOCATED, setting), *_on_splits(_OUR_PARTS_ON_SPLITS, setting)]


def rivals(setting: Setting) -> list[Entry]:
    """Every rival on every split of the workers, and those whose workers are all alike."""
    chunked = [_in_chunks(each) for each in _RIVALS if each.label in _MAY_SHARE and each.slicing == "whole"]
    on_splits = [*_RIVALS_ON_SPLITS, *chunked, *_taichi_chunks()]
    return [*_unsplit(_RIVALS_UNSPLIT, setting), *_on_splits(on_splits, setting)]


def _in_chunks(rival: Contestant) -> Contestant:
    return replace(rival, label=f"{rival.label} chunked", slicing="itl-chunks")


def _taichi_chunks() -> Iterator[Contestant]:
    taichi = next(each for each in _RIVALS if each.label == "taichi")
    for prefill, decode in _TAICHI_CHUNKS:
        sizes = f"prefill_heavy_tokens={prefill},decode_heavy_tokens={decode}"
        yield replace(
            taichi,
            label=f"taichi {prefill}/{decode}",
            routing=f"taichi({sizes})",
            slicing=f"taichi({sizes})",
        )


def splits(setting: Setting) -> Iterator[Setting]:
    """The setting with every split of its workers into prefill and decode workers, its own and similar ones first."""
    own, decode = _degrees(setting.prefill), _degrees(setting.decode)
    workers = Counter(own + decode)
    counts = (range(workers[degree] + 1) for degree in sorted(workers))
    parts = [Counter(dict(zip(sorted(workers), part, strict=True))) for part in product(*counts)]
    parts = [part for part in parts if 0 < part.total() < workers.total()]
    parts.sort(key=lambda part: (part != Counter(own), abs(sum(part.elements()) - sum(own)), sum(part.elements())))
    for part in parts:
        yield replace(setting, prefill=_groups(part), decode=_groups(workers - part))


def _groups(workers: Counter[int]) -> str:
    """As in 2xTP1+1xTP4."""
    return "+".join(f"{count}xTP{degree}" for degree, count in sorted(workers.items()) if count)


def _on_splits(contestants: Sequence[Contestant], setting: Setting) -> list[Entry]:
    return [Entry(contestant, split) for contestant in contestants for split in splits(setting)]


def _unsplit(contestants: Sequence[Contestant], setting: Setting) -> list[Entry]:
    return [Entry(contestant, setting) for contestant in contestants]


def _degrees(text: str) -> list[int]:
    """The degree of each worker of a layout."""
    return [theta.tp for count, theta in parse_groups(text, "layout") for _ in range(count)]
