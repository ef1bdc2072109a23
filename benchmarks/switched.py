"""Policies that a file names: one running graph plays several contestants in turn, without new engines.

An engine takes minutes to start on a small machine; contestants that alternate in one graph also meet the same
processes. In the environment `switched_environment` every process of the graph knows `switched(file=PATH)`. Unlike any
other policy these do I/O: they look at every decision whether the file has changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from pydantic import Field

from ampd.policies.base import (
    BindingPolicy,
    BindingSituation,
    OrderingPolicy,
    OrderingSituation,
    Pick,
    PoolsPolicy,
    PoolsSituation,
    RoleChange,
    RoutingPolicy,
    RoutingSituation,
    SlicingPolicy,
    SlicingSituation,
)
from ampd.policies.registry import KINDS, MODULES_VARIABLE, Kind, Policy, create_named
from ampd.types import Role, RouteDecision, Slo, WorkerView

_ROOT = Path(__file__).resolve().parents[1]


def switch(
    file: Path,
    policies: Mapping[Kind, str],
    prefill: int,
    slo: Slo,
) -> None:
    """Name the policies that hold from now on.

    Args:
        prefill: with static pools the graph goes back to this many prefill workers.
        slo: what pools policies are told instead of the graph's default targets.
    """
    draft = file.with_suffix(".draft")
    content = dict(policies) | {"prefill": prefill, "slo": [slo.ttft_s, slo.itl_s]}
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(file)


def switched_environment() -> dict[str, str]:
    """Our environment, and in it the policies of this module, which are registered nowhere else."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {MODULES_VARIABLE: "benchmarks.switched_registered", "PYTHONPATH": os.pathsep.join(paths)}


def switched_flags(file: Path) -> list[str]:
    """Flags of `ampd serve` for a graph whose policies are all switched."""
    return [word for kind in KINDS for word in (f"--{kind}", f"switched(file={file})")]


class _Switched(Policy):
    file: Path = Field(Path("switch.json"), description="JSON object: kind of policy -> its name, as `switch` writes.")

    def _now(self, kind: Kind) -> Any:
        return _made(kind, self.file, self.file.stat().st_mtime_ns)


@lru_cache
def _made(kind: Kind, file: Path, _changed_ns: int) -> Any:
    return create_named(kind, _content(file)[kind])


def _content(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


class SwitchedBinding(_Switched):
    """The binding that the file names."""

    def bind(self, situation: BindingSituation) -> str:
        """Its choice."""
        return cast(BindingPolicy, self._now("binding")).bind(situation)


class SwitchedRouting(_Switched):
    """The routing that the file names."""

    def route(self, situation: RoutingSituation) -> RouteDecision:
        """Its decision."""
        return cast(RoutingPolicy, self._now("routing")).route(situation)


class SwitchedOrdering(_Switched):
    """The ordering that the file names."""

    def pick(self, situation: OrderingSituation) -> Pick:
        """Its pick."""
        return cast(OrderingPolicy, self._now("ordering")).pick(situation)


class SwitchedSlicing(_Switched):
    """The slicing that the file names."""

    def slice(self, situation: SlicingSituation) -> int:
        """Its size of the next pass."""
        return cast(SlicingPolicy, self._now("slicing")).slice(situation)


class SwitchedPools(_Switched):
    """The pools policy that the file names; an idle one brings the workers back to the roles of the start."""

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        """Its changes, or the changes back."""
        policy, content = cast(PoolsPolicy, self._now("pools")), _content(self.file)
        if policy.is_idle:
            return _back(situation.workers, content["prefill"])
        # The graph's own targets are from before those of the contest were known.
        return policy.change(replace(situation, slo=Slo(*content["slo"])))


def _back(workers: Sequence[WorkerView], prefill: int) -> list[RoleChange]:
    """Changes to `prefill` prefill workers, whichever they are."""
    have = [worker for worker in workers if worker.role is Role.PREFILL]
    lack = [worker for worker in workers if worker.role is Role.DECODE][: max(prefill - len(have), 0)]
    changes = [RoleChange(worker.worker_id, Role.PREFILL, "back") for worker in lack]
    return changes + [RoleChange(worker.worker_id, Role.DECODE, "back") for worker in have[prefill:]]
