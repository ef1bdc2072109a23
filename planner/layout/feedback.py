"""Corrects the costs of the programme by what trials have shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import exp, log

from ampd.types import Role
from planner.layout.costs import Costs
from planner.layout.layout import Layout


def corrected(costs: Costs, carried: Mapping[Layout, float]) -> Costs:
    """The costs, so that their bounds are nearer to the rates that layouts carried in trials.

    A kind of replica is one degree in one phase. Each gets the mean of simulated over predicted rate of the layouts
    that have it (geometric, weighted by its share of their GPUs).
    """
    sums: defaultdict[tuple[bool, int], float] = defaultdict(float)
    weights: defaultdict[tuple[bool, int], float] = defaultdict(float)
    for layout, rate in carried.items():
        bound = costs.bound(layout)
        if not bound or not rate:
            continue
        for role, group in layout.groups.items():
            # Replicas that own sessions prefill all prompts where there are no prefill replicas.
            phases = (True,) if role is Role.PREFILL else (False,) if layout.prefill else (False, True)
            for degree, count in group:
                share = degree * count / layout.gpus
                for is_prefill in phases:
                    sums[is_prefill, degree] += share * log(rate / bound)
                    weights[is_prefill, degree] += share

    def factor(is_prefill: bool, degree: int) -> float:
        weight = weights[is_prefill, degree]
        return exp(-sums[is_prefill, degree] / weight) if weight else 1.0

    return replace(
        costs,
        prefill_s={n: seconds * factor(True, n) for n, seconds in costs.prefill_s.items()},
        decode_s={n: seconds * factor(False, n) for n, seconds in costs.decode_s.items()},
    )


def surprising(
    costs: Costs, rate: float, carrying: Collection[Layout], failed: Collection[Layout]
) -> dict[Layout, float]:
    """What trials of one rate tell about the costs: the layouts whose bound says something else than their trials.

    They carry the rate although their bound is lower, or fail although it is higher. So the rate is nearer to what they
    carry than their bound is.

    Returns:
        The rate of each such layout, for `corrected`.
    """
    more = [layout for layout in carrying if costs.bound(layout) < rate]
    less = [layout for layout in failed if costs.bound(layout) > rate]
    return dict.fromkeys([*more, *less], rate)
