"""Policies that block the event loop of their process for good, at a prompt of 500 tokens and more."""

from __future__ import annotations

import time

from ampd.policies.base import RoutingSituation, SlicingSituation
from ampd.policies.estimates import local
from ampd.policies.registry import Policy, register
from ampd.types import PrefillTask, RouteDecision

DEADLY_TOKENS = 500


@register("routing", "hanging")
class HangingRouting(Policy):
    """Blocks a coordinator."""

    def route(self, situation: RoutingSituation) -> RouteDecision:
        _hang_at(situation.task)
        return local(situation.decode, "hanging")


@register("slicing", "hanging")
class HangingSlicing(Policy):
    """Blocks a worker."""

    def slice(self, situation: SlicingSituation) -> int:
        _hang_at(situation.task)
        return situation.task.incr_tokens


def _hang_at(task: PrefillTask) -> None:
    while task.incr_tokens >= DEADLY_TOKENS:
        time.sleep(60)
