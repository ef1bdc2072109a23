"""`ampd plan`: the layout of a cluster for a workload, a model, a kind of GPU and targets."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ampd.documents import check_writable
from ampd.errors import UserError
from ampd.perf.piecewise import PiecewiseModel
from ampd.policies.registry import create_named
from ampd.reports.figures import format_share
from ampd.settings import parse_settings
from ampd.types import Parallelism
from planner.case_settings import provenance_of
from planner.layout.cache import CurveCache, default_cache
from planner.layout.explain import meets, sentences, slack_of
from planner.layout.layout import Layout, layout_label
from planner.layout.search import Checked, Plan, PlanCase, demand_of, make_plan, memory_needs
from planner.manifest.planned import check_flags, write_plan
from planner.plan_settings import PlanSettings
from planner.plan_table import plan_table
from planner.simulator.options import SimulationOptions
from workloads.results import local_share
from workloads.trace import Session, load_trace

PROG = "ampd plan"


def run(argv: Sequence[str]) -> int:
    """Plan and print.

    Raises:
        UserError: wrong flags, an unknown name, or GPUs that hold no layout at all.
    """
    start_s = time.perf_counter()
    settings = parse_settings(PlanSettings, argv, PROG)
    for kind in ("routing", "ordering", "slicing"):
        create_named(kind, getattr(settings, kind))
    check_writable(settings.report)
    check_flags(settings)
    model = settings.performance_model()
    case, left_out = _case(settings, model)
    if settings.use_all or settings.by_trials:
        from planner.goodput_command import plan_for_goodput, table_of
        from planner.goodput_report import write_report as write_goodput_report

        needs = memory_needs(case, demand_of(case)) if case.rate else []
        if any(need > case.gpus * _most_per_gpu(tokens) for tokens, need in needs):
            raise UserError(_too_small(case, needs))
        result, layouts = plan_for_goodput(settings, case, left_out, model, start_s)
        _warn(result, settings, layouts, model)
        if settings.report:
            write_goodput_report(settings.report, result)
        print(json.dumps(result, indent=1) if settings.as_json else table_of(result))
        return 0
    folder = (settings.cache or default_cache()) if settings.use_cache else None
    plan = make_plan(case, settings.top, CurveCache(folder), settings.jobs)
    if not plan.layouts:
        raise UserError(_too_small(case, plan.capacities.memory_needs(plan.demand)))
    seconds = time.perf_counter() - start_s
    result = _result(settings, plan, case, model, sentences(plan, case.gpus, left_out), seconds)
    layouts = [checked.choice.layout for checked in plan.layouts]
    _warn(result, settings, layouts, model)
    if settings.report:
        from planner.plan_report import write_report

        write_report(settings.report, result, plan)
    print(json.dumps(result, indent=1) if settings.as_json else _table(result))
    return 0


def _warn(result: dict[str, Any], settings: PlanSettings, layouts: list[Layout], model: PiecewiseModel) -> None:
    """Write the manifest if asked for, and print its warnings."""
    result["manifest_warnings"] = write_plan(settings, layouts, model, result)
    for warning in result["manifest_warnings"]:
        print(f"{PROG}: {warning}", file=sys.stderr)


def _case(settings: PlanSettings, model: PiecewiseModel) -> tuple[PlanCase, dict[int, str]]:
    """The case to plan, and the unusable degrees with the reasons."""
    sessions = load_trace(settings.trace, settings.limit)
    wanted = _degrees(settings.degrees)
    longest = max(session.max_context_tokens for session in sessions)
    capacities = _capacities(settings, model, wanted)
    fitting = _fitting(settings, capacities, longest)
    case = PlanCase(
        tuple(sessions),
        settings.rate or (0.0 if settings.use_all else _own_rate(sessions, settings.trace)),
        settings.slo,
        model,
        fitting,
        settings.gpus,
        settings.routing,
        settings.ordering,
        settings.slicing,
        SimulationOptions(seed=settings.seed),
        {degree: tokens for degree in fitting if (tokens := settings.kv_store_of(model, Parallelism(degree)))},
        settings.attainment,
    )
    known = {theta.tp for theta in model.parallelisms}
    left_out = {}
    for degree in wanted:
        if degree in capacities and degree not in fitting:
            left_out[degree] = f"the KV memory of a replica does not hold the longest session ({longest} tokens)"
        elif degree not in known and degree <= settings.gpus - min(capacities):
            left_out[degree] = "the weights do not fit, or the performance model has no times for it"
    return case, left_out


def _capacities(settings: PlanSettings, model: PiecewiseModel, wanted: Sequence[int]) -> dict[int, int]:
    """KV memory by degree. A degree counts if the GPUs also take a second replica, of the smallest degree."""
    known = {theta.tp: theta for theta in model.parallelisms}
    usable = [known[degree] for degree in wanted if degree in known]
    if not usable:
        raise UserError(
            f"--degrees: {model.name} fits or is known at TP {', '.join(map(str, known))}, not at {settings.degrees}"
        )
    model.require(usable, usable)
    smallest = min(theta.tp for theta in usable)
    if settings.gpus < 2 * smallest:
        raise UserError(
            f"--gpus: {settings.gpus} is too few: one prefill and one decode replica of {model.name} need "
            f"{2 * smallest} (TP {smallest} each)"
        )
    # A co-located replica needs no other one.
    most = settings.gpus - (0 if settings.use_all or settings.by_trials else smallest)
    return {theta.tp: settings.kv_capacity_of(model, theta) for theta in usable if theta.tp <= most}


def _fitting(settings: PlanSettings, capacities: dict[int, int], longest: int) -> dict[int, int]:
    """The capacities that hold the longest session."""
    fitting = {degree: tokens for degree, tokens in capacities.items() if not 0 < tokens < longest}
    if not fitting:
        raise UserError(
            f"{settings.trace}: its longest session has {longest} tokens, the KV memory of a replica holds at most "
            f"{max(capacities.values())}; more GPUs per replica, or fewer tokens"
        )
    if settings.gpus < 2 * min(fitting):
        raise UserError(
            f"--gpus: {settings.gpus} is too few: the longest session of {settings.trace} ({longest} tokens) fits the "
            f"KV memory of a replica from TP {min(fitting)} on, and one prefill and one decode replica are needed"
        )
    return fitting


def _degrees(text: str) -> list[int]:
    try:
        degrees = sorted({int(part) for part in text.split(",")})
    except ValueError:
        degrees = []
    if not degrees or degrees[0] < 1:
        raise UserError(f"--degrees: give positive numbers, as 1,2,4,8 (given: {text!r})")
    return degrees


def _own_rate(sessions: Sequence[Session], trace: str) -> float:
    span_s = sessions[-1].arrival_s - sessions[0].arrival_s
    if span_s <= 0:
        raise UserError(f"--rate is missing: the sessions of {trace} all arrive at once, so it has no rate of its own")
    rate = (len(sessions) - 1) / span_s
    print(f"{PROG}: planning for the trace's own rate, {rate:.3g} sessions/s", file=sys.stderr)
    return rate


def _most_per_gpu(tokens: Mapping[int, float]) -> float:
    return max(tokens[degree] / degree for degree in tokens)


def _too_small(case: PlanCase, needs: Sequence[tuple[Mapping[int, float], float]]) -> str:
    kinds = ["resident, a GPU of a decode replica holds"]
    if len(needs) > 1:
        kinds = ["running, a GPU of a decode replica holds", "resident, the KV store of a GPU holds"]
    best = [_most_per_gpu(tokens) for tokens, _ in needs]
    facts = [
        f"{need:.0f} tokens are {kind} at most {most:.0f}"
        for (_, need), kind, most in zip(needs, kinds, best, strict=True)
    ]
    return f"--gpus: {case.gpus} cannot hold the KV of the sessions at {case.rate:g}/s: {'; '.join(facts)}"


def _result(
    settings: PlanSettings, plan: Plan, case: PlanCase, model: PiecewiseModel, explanation: list[str], seconds: float
) -> dict[str, Any]:
    return {
        "layouts": [_layout(checked, plan, case.gpus) for checked in plan.layouts],
        "explanation": explanation,
        "meets_slo": meets(plan.layouts[0].choice, plan.capacities),
        "next_step": _next_step(plan),
        "gpus": case.gpus,
        "rate": case.rate,
        "slo": {"ttft": case.slo.ttft_s, "itl": case.slo.itl_s},
        "routing": case.routing,
        "ordering": case.ordering,
        "slicing": case.slicing,
        "trace": settings.trace,
        "seed": settings.seed,
        "resident_kv_tokens": plan.demand.resident_kv_tokens,
        **_store_figures(plan),
        "performance_model": provenance_of(model),
        "manifest": None if settings.output_manifest is None else str(settings.output_manifest),
        "manifest_warnings": [],
        "seconds": seconds,
    }


def _store_figures(plan: Plan) -> dict[str, Any]:
    """The running KV, and the host memory of a replica by degree, where replicas have KV stores."""
    stores = plan.capacities.store_tokens
    if not stores:
        return {}
    tokens = {str(degree): tokens for degree, tokens in stores.items()}
    return {"running_kv_tokens": plan.demand.running_kv_tokens, "kv_store_tokens": tokens}


def _layout(checked: Checked, plan: Plan, gpus: int) -> dict[str, Any]:
    slack = slack_of(checked.choice, plan.capacities, plan.demand, gpus)
    return {
        **checked.choice.layout.as_dict(),
        "objective": plan.capacities.levels[checked.choice.level],
        "headroom": checked.choice.headroom,
        "meets_slo": meets(checked.choice, plan.capacities),
        "slack": {name: value for name, value in asdict(slack).items() if value is not None},
        "simulated": checked.simulated,
    }


def _next_step(plan: Plan) -> dict[str, Any] | None:
    if plan.next_step is None:
        return None
    step, choice = plan.next_step
    objective = plan.capacities.levels[choice.level]
    return {"more_gpus": step, **choice.layout.as_dict(), "objective": objective, "headroom": choice.headroom}


def _table(result: dict[str, Any]) -> str:
    columns = ("layout", "GPUs", "P95/SLO", "head-room", "attained", "TTFT P95", "ITL P95", "local")
    rows = []
    for layout in result["layouts"]:
        simulated = layout["simulated"]
        rows.append(
            (
                layout_label(layout),
                str(layout["gpus"]),
                f"{layout['objective']:.2f}",
                f"{layout['headroom']:.2f}",
                format_share(simulated["attainment"]["rounds"]),
                f"{(simulated['ttft_s']['p95'] or 0) * 1e3:.0f} ms",
                f"{(simulated['itl_s']['p95'] or 0) * 1e3:.1f} ms",
                format_share(local_share(simulated), 0),
            )
        )
    load = f"{result['gpus']} GPUs, {result['rate']:g} sessions/s"
    return plan_table(columns, rows, load, result)
