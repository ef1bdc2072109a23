"""A plan: its layouts with their figures, and how it was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.layout.appraisal import Appraised, Figure, Varied
from planner.layout.demand import Demand
from planner.layout.layout import Layout
from planner.layout.trials import BUDGET_S

INTERRUPTED = "it was interrupted"


def time_over(budget_s: float, share: float = 1.0) -> str:
    """Why a search ended early; `share`: the part of the budget that it had."""
    if share < 1:
        return f"the time for the search was over ({share:.0%} of --budget-s {budget_s:g})"
    return f"the time was over (--budget-s {budget_s:g})"


@dataclass(frozen=True, slots=True)
class NextStep:
    """More GPUs, the best layout with them, and how much more it carries.

    Attributes:
        gain: sessions per second, seed by seed.
    """

    more_gpus: int
    best: Appraised
    gain: Figure


@dataclass(frozen=True, slots=True)
class GoodputPlan:
    """The layouts, best first, with their figures.

    Attributes:
        has_fewest_gpus: the first layout is the smallest that was found to carry the rate. Else it carries the most.
        rate: sessions per second that the layouts were checked at.
        next_step: None: no gain is known, for example because no rate that was tried was too high for a layout.
        variations: the best layout under other circumstances. Those of a part begin with the part as planned.
        stopped: why the simulations ended early; empty: they ended as planned.
        is_decided: the search had ended before the simulations were stopped, so only figures are missing. False also
            if the time was over before layouts that may carry as much were told apart.
        trials: how many simulations, or searches of goodput, were made.
        scale: the search was made for this part of the cluster and of the rate (2: one half), because whole ones are
            too large. `variations` are of this part. So are goodput and `next_step`, times `copies`.
        copies: of the part, which the first layout consists of: `scale`, or as many as carry the rate.
        is_checked: the whole cluster was simulated. Else all figures are for the part that was searched.
        filled_gpus: GPUs that remained beside the parts and got replicas too.
        is_estimated: the search ended before a layout was found to carry the rate. The first one is a guess with a
            reserve.
        is_untried: the search for the most goodput ended before a layout was found to carry any rate.
        none_carries: the search of a layout that carries the rate had ended without one before the simulations were
            stopped.
        tied: layouts that are not shown to carry less than the first one, where the most goodput was searched.
        fuller: a layout of more GPUs than the first one, and what its simulations showed, where GPUs are left although
            as many as possible are wanted.
        carried_rate: sessions per second that the first layout carried in a short trial, where `none_carries`; 0: it is
            not known.
        is_enlarged: the first layout has more copies than its part's goodput asks for, because the whole did not carry
            the rate with fewer.
        is_settled: the number of copies was searched to its end. Else the first layout carries the rate, and fewer
            copies may do too, or it fails, and more may carry it.
    """

    layouts: list[Appraised]
    rate: float
    attainment: float
    demand: Demand
    variations: list[Varied]
    next_step: NextStep | None
    stopped: str
    trials: int
    has_fewest_gpus: bool = False
    is_decided: bool = True
    scale: int = 1
    copies: float = 1.0
    is_checked: bool = True
    is_estimated: bool = False
    is_untried: bool = False
    none_carries: bool = False
    carried_rate: float = 0.0
    is_enlarged: bool = False
    is_settled: bool = True
    filled_gpus: int = 0
    fuller: tuple[Layout, str] | None = None
    tied: Sequence[Layout] = ()

    @property
    def carries(self) -> bool:
        """Whether the best layout carries the rate."""
        return self.layouts[0].carries_rate


def by_goodput(layouts: Sequence[Appraised]) -> list[Appraised]:
    """Those that carry the rate first, then those that carry most, by the figures that a plan shows."""

    def rank(appraised: Appraised) -> tuple[bool, float]:
        return not appraised.carries_rate, -appraised.goodput.mean if appraised.goodput is not None else 0.0

    return sorted(layouts, key=rank)


@dataclass(frozen=True, slots=True)
class Wishes:
    """How to search.

    Attributes:
        uses_all: the most goodput of all GPUs, instead of the fewest GPUs that carry the rate.
        top: layouts to show.
        jobs: processes; None: one per core.
        budget_s: seconds for the simulations.
        search_share, figures_share: the shares of them after which the search ends, and after which no figures are
            added to a layout that was chosen.
        scale: of how many such parts the cluster consists.
    """

    uses_all: bool = False
    top: int = 3
    jobs: int | None = None
    budget_s: float = BUDGET_S
    search_share: float = 1.0
    figures_share: float = 1.0
    scale: int = 1
