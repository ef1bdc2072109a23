"""The result of `ampd plan`, as `--json` prints it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from ampd.perf.piecewise import PiecewiseModel
from planner.case_settings import provenance_of
from planner.layout.appraisal import Appraised
from planner.layout.case import PlanCase
from planner.layout.explain import headroom_of, p95_over_target, sentences, slack_of, summary
from planner.layout.goodput_plan import make_goodput_plan
from planner.layout.layout import Layout
from planner.layout.plan import GoodputPlan, Wishes
from planner.layout.trial import Trial
from planner.plan_settings import PlanSettings

_HOUR_S = 3600


def planned(
    settings: PlanSettings, case: PlanCase, left_out: Mapping[int, str], model: PiecewiseModel, argv: Sequence[str]
) -> tuple[dict[str, Any], list[Layout]]:
    """The object that `--json` prints, and the layouts, best first. `argv`: the arguments of the command."""
    plan = make_goodput_plan(case, Wishes(settings.use_all, settings.top, settings.jobs, settings.budget_s))
    result = {
        "layouts": [_layout(appraised, plan, case) | _cost(appraised, plan, settings) for appraised in plan.layouts],
        "summary": summary(plan),
        "explanation": sentences(plan, case, left_out),
        "meets_slo": plan.carries,
        "next_step": _next_step(plan, case, settings),
        "variations": [
            {
                "name": each.variation.name,
                "attainment": asdict(each.attainment),
                "sessions_in_time": each.in_time,
                "carries": each.carries,
            }
            for each in plan.variations
        ],
        "attainment_level": plan.attainment,
        "gpus": case.gpus,
        "rate": plan.rate,
        "slo": {"ttft": case.slo.ttft_s, "itl": case.slo.itl_s},
        "routing": case.routing,
        "ordering": case.ordering,
        "slicing": case.slicing,
        "trace": settings.trace,
        "seed": settings.seed,
        "resident_kv_tokens": plan.demand.resident_kv_tokens,
        **_store_figures(plan, case),
        "performance_model": provenance_of(model),
        "manifest": None if settings.output_manifest is None else str(settings.output_manifest),
        "manifest_warnings": [],
        "gpu_price": settings.gpu_price,
        "command": shlex.join(["ampd", "plan", *argv]),
        "version": version("ampd"),
        "uses_all": settings.use_all,
        "scale": plan.scale,
        "copies": plan.copies,
        "trials": plan.trials,
        "is_decided": plan.is_decided,
        "tied": [each.as_dict() for each in plan.tied],
        "is_checked": plan.is_checked,
        "is_estimated": plan.is_estimated,
        "stopped": plan.stopped or None,
        "seconds": 0.0,
    }
    return result, [appraised.layout for appraised in plan.layouts]


def _store_figures(plan: GoodputPlan, case: PlanCase) -> dict[str, Any]:
    """The running KV, and the host memory of a replica by degree, where replicas have KV stores."""
    if not case.kv_store_tokens:
        return {}
    tokens = {str(degree): tokens for degree, tokens in case.kv_store_tokens.items()}
    return {"running_kv_tokens": plan.demand.running_kv_tokens, "kv_store_tokens": tokens}


def _layout(appraised: Appraised, plan: GoodputPlan, case: PlanCase) -> dict[str, Any]:
    slack = slack_of(appraised, plan, case)
    return {
        **appraised.layout.as_dict(),
        "objective": p95_over_target(appraised, case),
        "headroom": headroom_of(appraised, plan.rate),
        "meets_slo": appraised.carries_rate,
        "attainment": asdict(appraised.attainment),
        "goodput": None if appraised.goodput is None else asdict(appraised.goodput),
        "goodput_is_least": appraised.goodput_is_least,
        "curve": [_point(appraised, rate, trial, plan.attainment) for rate, trial in appraised.curve],
        "slack": {name: value for name, value in asdict(slack).items() if value is not None},
        "simulated": appraised.simulated,
    }


def _point(appraised: Appraised, rate: float, trial: Trial, attainment: float) -> dict[str, Any]:
    """A rate that was tried. A trial that was stopped knows only the most that its shares can be."""
    attained = trial.met if trial.is_whole else trial.most
    return {
        "rate": rate,
        "attainment": attained,
        "sessions_in_time": trial.in_time,
        "is_most": not trial.is_whole,
        "carries": appraised.carries_at(rate, trial, attainment),
    }


def _cost(appraised: Appraised, plan: GoodputPlan, settings: PlanSettings) -> dict[str, Any]:
    """The GPU hours of 1000 sessions, and with `--gpu-price` the price of an hour.

    The sessions come at the plan's rate, or at the one that the layout carries if that is less; None: it is not known.
    """
    gpus, headroom = appraised.layout.gpus, headroom_of(appraised, plan.rate)
    rate = plan.rate if appraised.carries_rate else 0.0
    if headroom is not None:
        rate = plan.rate * min(headroom, 1.0)
    hours = {"gpu_hours_per_1000_sessions": gpus / rate / _HOUR_S * 1000 if rate else None}
    return hours if settings.gpu_price is None else {**hours, "price_per_hour": gpus * settings.gpu_price}


def _next_step(plan: GoodputPlan, case: PlanCase, settings: PlanSettings) -> dict[str, Any] | None:
    step = plan.next_step
    if step is None:
        return None
    return {
        "more_gpus": step.more_gpus,
        **step.best.layout.as_dict(),
        "objective": p95_over_target(step.best, case),
        "headroom": headroom_of(step.best, plan.rate),
        "gain": asdict(step.gain),
        **_cost(step.best, plan, settings),
    }
