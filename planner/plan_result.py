"""The result of `ampd plan`, as `--json` prints it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from statistics import fmean
from typing import Any

from ampd.perf.piecewise import PiecewiseModel
from planner.case_settings import provenance_of
from planner.layout.candidate import Candidate, Figure
from planner.layout.case import PlanCase
from planner.layout.demand import Demand, demand_of
from planner.layout.explain import Slack, headroom_of, p95_over_target, sentences, slack_of, summary
from planner.layout.layout import Layout
from planner.layout.plan import MORE_LOAD, Plan, Wishes, make_plan
from planner.plan_settings import PlanSettings

_HOUR_S = 3600


def planned(
    settings: PlanSettings, case: PlanCase, left_out: Mapping[int, str], model: PiecewiseModel, argv: Sequence[str]
) -> tuple[dict[str, Any], list[Layout]]:
    """The object that `--json` prints, and the layouts, best first. `argv`: the arguments of the command."""
    plan = make_plan(case, Wishes(settings.use_all, settings.top, settings.jobs, settings.budget_s))
    demand = demand_of(replace(case, rate=plan.rate))
    slacks = [slack_of(each, plan, case, demand) for each in plan.layouts]
    result = {
        "layouts": [
            _layout(each, slack, plan, case) | _cost(each, plan.rate, settings)
            for each, slack in zip(plan.layouts, slacks, strict=True)
        ],
        "summary": summary(plan, case),
        "explanation": sentences(plan, case, left_out, slacks[0] if slacks else None),
        "meets_slo": plan.carries,
        "next_step": _next_step(plan, case, settings),
        "more_load": _more_load(plan),
        "attainment_level": case.attainment,
        "gpus": case.gpus,
        "rate": plan.rate,
        "slo": {"ttft": case.slo.ttft_s, "itl": case.slo.itl_s},
        "routing": case.routing,
        "ordering": case.ordering,
        "slicing": case.slicing,
        "trace": settings.trace,
        "seed": settings.seed,
        "resident_kv_tokens": demand.resident_kv_tokens,
        **_store_figures(demand, case),
        "performance_model": provenance_of(model),
        "manifest": None if settings.output_manifest is None else str(settings.output_manifest),
        "manifest_warnings": [],
        "gpu_price": settings.gpu_price,
        "command": shlex.join(["ampd", "plan", *argv]),
        "version": version("ampd"),
        "uses_all": settings.use_all,
        "scale": plan.scale,
        "trials": plan.trials,
        "stopped": plan.stopped or None,
        "seconds": 0.0,
    }
    return result, [each.layout for each in plan.layouts]


def _store_figures(demand: Demand, case: PlanCase) -> dict[str, Any]:
    """The running KV, and the host memory of a replica by degree, where replicas have KV stores."""
    if not case.kv_store_tokens:
        return {}
    tokens = {str(degree): tokens for degree, tokens in case.kv_store_tokens.items()}
    return {"running_kv_tokens": demand.running_kv_tokens, "kv_store_tokens": tokens}


def _layout(candidate: Candidate, slack: Slack, plan: Plan, case: PlanCase) -> dict[str, Any]:
    goodput = candidate.figure()
    return {
        **candidate.layout.as_dict(),
        "objective": p95_over_target(candidate, plan.rate, case),
        "headroom": headroom_of(candidate, plan.rate),
        "meets_slo": candidate.carries(plan.rate),
        "attainment": asdict(candidate.attainment(plan.rate)),
        "goodput": None if goodput is None else asdict(goodput),
        "curve": _curve(candidate),
        "slack": {name: value for name, value in asdict(slack).items() if value is not None},
        "simulated": candidate.simulated(plan.rate),
    }


def _curve(candidate: Candidate) -> list[dict[str, Any]]:
    """The rates that were tried with the first seed. A trial that was stopped knows only the most that its shares can
    be. If the goodput is known, it decides which rates are carried."""
    level = candidate.attainment_level
    return [
        {
            "rate": rate,
            "attainment": trial.met if trial.is_whole else trial.most,
            "sessions_in_time": trial.in_time,
            "is_most": not trial.is_whole,
            "carries": rate <= candidate.most if candidate.seeds else trial.carries(level),
        }
        for rate, trial in candidate.curve()
    ]


def _cost(candidate: Candidate, rate: float, settings: PlanSettings) -> dict[str, Any]:
    """The GPU hours of 1000 sessions, and with `--gpu-price` the price of an hour.

    The sessions come at the plan's rate, or at the one that the layout carries if that is less; None: it is not known.
    """
    gpus = candidate.layout.gpus
    carried = rate if candidate.carries(rate) else min(rate, candidate.most)
    hours = {"gpu_hours_per_1000_sessions": gpus / carried / _HOUR_S * 1000 if carried else None}
    return hours if settings.gpu_price is None else {**hours, "price_per_hour": gpus * settings.gpu_price}


def _more_load(plan: Plan) -> dict[str, Any] | None:
    """The best layout at 20 % more than the plan's rate; None: it was not simulated."""
    rate = MORE_LOAD * plan.rate
    if not plan.layouts or not (trials := plan.layouts[0].at_load(rate)):
        return None
    return {
        "rate": rate,
        "attainment": asdict(Figure.of([trial.met for trial in trials], most=1.0)),
        "sessions_in_time": fmean(trial.in_time for trial in trials),
        "carries": plan.layouts[0].most >= rate,
    }


def _next_step(plan: Plan, case: PlanCase, settings: PlanSettings) -> dict[str, Any] | None:
    step = plan.next_step
    if step is None:
        return None
    return {
        "more_gpus": step.more_gpus,
        **step.best.layout.as_dict(),
        "objective": p95_over_target(step.best, plan.rate, case),
        "headroom": headroom_of(step.best, plan.rate),
        "gain": asdict(step.gain),
        **_cost(step.best, plan.rate, settings),
    }
