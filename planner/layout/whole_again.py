"""The plan of a large cluster: the whole is checked, and again when its part has further figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from planner.layout.case import PlanCase
from planner.layout.plan import INTERRUPTED, GoodputPlan, Wishes
from planner.layout.trials import Trials
from planner.layout.whole import contradicts, whole_plan


class PartPlanner(Protocol):
    """Plans the part of a cluster."""

    @property
    def scale(self) -> int:
        """Of how many such parts the cluster consists."""

    @property
    def lacks_figures(self) -> bool:
        """Whether its search ended, and there was no time for all figures of its layouts."""

    def go_on(self, end_s: float, *, with_goodputs: bool) -> GoodputPlan:
        """The plan with the figures for which there was no time.

        Args:
            end_s: seconds after the start at which they are given up.
            with_goodputs: of the alternatives and the best layout too.
        """


def plan_of_whole(
    case: PlanCase, planner: PartPlanner, plan_of_part: GoodputPlan, wishes: Wishes, trials: Trials
) -> GoodputPlan:
    """The plan of the whole cluster. If the part lacks figures then, they get the time that is left.

    Args:
        trials: of the whole cluster.
    """
    scale = planner.scale
    plan = whole_plan(case, plan_of_part, scale, wishes, trials)
    check_s = trials.elapsed_s
    # A goodput that was not known before asks for another check. In the end only figures are added that ask for none.
    for reserve_s in (check_s, 0.0):
        if not planner.lacks_figures or plan.stopped == INTERRUPTED:
            break
        more = planner.go_on(wishes.budget_s - reserve_s, with_goodputs=reserve_s > 0)
        later = whole_plan(case, more, scale, wishes, trials, is_again=True)
        is_worth = later.is_checked and _worth(later) >= _worth(plan)
        if is_worth or not plan.is_checked or contradicts(case, more, plan):
            plan = later
            continue
        plan = _with_newest_alternatives(plan, later)
        if later.stopped == INTERRUPTED:
            plan = replace(plan, stopped=INTERRUPTED)
    return plan


def _worth(plan: GoodputPlan) -> tuple[bool, int]:
    return plan.carries, plan.layouts[0].attainment.seeds


def _with_newest_alternatives(plan: GoodputPlan, later: GoodputPlan) -> GoodputPlan:
    """The plan with what is known now of its alternatives. They keep their order, but those that fail come last."""
    newest = {each.layout: each for each in later.layouts} if later.is_checked else {}
    best, *others = plan.layouts
    others = sorted((newest.get(each.layout, each) for each in others), key=lambda each: not each.carries_rate)
    return replace(plan, layouts=[best, *others])
