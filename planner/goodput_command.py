"""`ampd plan --use-all` and `--by-trials`: layouts found and explained by simulations of the cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ampd.perf.piecewise import PiecewiseModel
from ampd.reports.figures import format_share
from planner.case_settings import provenance_of
from planner.layout.appraisal import Appraised
from planner.layout.goodput_explain import headroom_of, p95_over_target, sentences, slack_of
from planner.layout.goodput_plan import GoodputPlan, Wishes, make_goodput_plan
from planner.layout.layout import Layout, layout_label
from planner.layout.search import PlanCase
from planner.plan_settings import PlanSettings
from planner.plan_table import plan_table
from workloads.results import local_share


def plan_for_goodput(
    settings: PlanSettings, case: PlanCase, left_out: Mapping[int, str], model: PiecewiseModel, start_s: float
) -> tuple[dict[str, Any], list[Layout]]:
    """The object that `--json` prints, and the layouts, best first. `start_s`: when the command began."""
    plan = make_goodput_plan(case, Wishes(settings.use_all, settings.top, settings.jobs, settings.budget_s))
    result = {
        "layouts": [_layout(appraised, plan, case) for appraised in plan.layouts],
        "explanation": sentences(plan, case, left_out),
        "meets_slo": plan.carries,
        "next_step": _next_step(plan, case),
        "variations": [{"name": each.name, "attainment": asdict(figure)} for each, figure in plan.variations],
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
        "uses_all": not plan.has_fewest_gpus,
        "scale": plan.scale,
        "trials": plan.trials,
        "stopped": plan.stopped or None,
        "seconds": time.perf_counter() - start_s,
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
        "curve": [{"rate": rate, "attainment": trial.met} for rate, trial in appraised.curve if trial.is_whole],
        "slack": {name: value for name, value in asdict(slack).items() if value is not None},
        "simulated": appraised.simulated,
    }


def _next_step(plan: GoodputPlan, case: PlanCase) -> dict[str, Any] | None:
    step = plan.next_step
    if step is None:
        return None
    return {
        "more_gpus": step.more_gpus,
        **step.best.layout.as_dict(),
        "objective": p95_over_target(step.best, case),
        "headroom": headroom_of(step.best, plan.rate),
        "gain": asdict(step.gain),
    }


_HEAD = ("layout", "GPUs", "carries", "attained", "TTFT P95", "ITL P95", "local")


def table_of(result: dict[str, Any]) -> str:
    """The plan as text for people."""
    load = f"{result['gpus']} GPUs, attained at {result['rate']:g} sessions/s"
    return plan_table(_HEAD, [_row(layout) for layout in result["layouts"]], load, result)


def _row(layout: dict[str, Any]) -> tuple[str, ...]:
    simulated, goodput = layout["simulated"], layout["goodput"]
    return (
        layout_label(layout),
        str(layout["gpus"]),
        "-" if goodput is None else f"{goodput['mean']:.3g}/s",
        format_share(layout["attainment"]["mean"]),
        f"{(simulated['ttft_s']['p95'] or 0) * 1e3:.0f} ms",
        f"{(simulated['itl_s']['p95'] or 0) * 1e3:.1f} ms",
        format_share(local_share(simulated), 0),
    )
