"""`ampd plan`: the layout of a cluster for a workload, a model, a kind of GPU and targets."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from statistics import fmean
from typing import Any

from ampd.documents import check_writable
from ampd.errors import RunError, UserError
from ampd.perf.piecewise import PiecewiseModel
from ampd.policies.registry import create_named
from ampd.reports import counted, format_number, format_share, text_table
from ampd.settings import parse_settings
from ampd.types import MAX_WAIT, Parallelism
from planner.case_settings import Limit, PlanSettings, misfits, provenance_of
from planner.layout.candidate import Candidate, Figure
from planner.layout.explain import (
    Slack,
    answer,
    headroom_of,
    p95_over_target,
    rate_text,
    sentences,
    slack_of,
)
from planner.layout.fluid import Demand, demand_of
from planner.layout.layout import Layout, PlanCase, layout_label
from planner.layout.plan import MORE_LOAD, Plan, Wishes, make_plan
from planner.layout.trial import Trial
from planner.manifest.planned import check_flags, write_plan
from planner.simulator.options import SimulationOptions
from workloads.results import local_share, require_attainment
from workloads.trace import Session, load_trace

PROG = "ampd plan"


def run(argv: Sequence[str]) -> int:
    """Plan and print.

    Raises:
        UserError: wrong flags, an unknown name, or GPUs that hold no replica, or not the KV of the longest session.
            After the plan is printed: its manifest cannot be written.
        RunError: after the plan is printed: the layout to write misses the rate, or the best one `--fail-under`.
    """
    start_s = time.perf_counter()
    settings = parse_settings(PlanSettings, argv, PROG)
    for kind in ("routing", "ordering", "slicing", "pools"):
        create_named(kind, getattr(settings, kind))
    check_writable(settings.report)
    check_flags(settings)
    model = settings.performance_model()
    case, left_out = case_of(settings, model, load_trace(settings.trace, settings.limit))
    result, layouts = planned(settings, case, left_out, model, argv)
    result["seconds"] = time.perf_counter() - start_s
    error: UserError | RunError | None = None
    needs = list[str]()
    try:
        result["manifest_warnings"], needs = write_plan(settings, layouts, model, result)
    except (UserError, RunError) as refused:
        # The plan took long, so it is shown all the same.
        error, result["manifest"] = refused, None
    for warning in result["manifest_warnings"]:
        print(f"{PROG}: {warning}", file=sys.stderr)
    print(json.dumps(result, indent=1) if settings.as_json else plan_table(result), flush=True)
    if needs and not settings.as_json:
        print("\n".join(needs), flush=True)
    if settings.report:
        from planner.reports import write_plan_report

        write_plan_report(settings.report, result)
    if error is not None:
        raise error
    require_attainment(result["layouts"][0]["attainment"]["mean"] if layouts else None, settings.fail_under, PROG)
    return 0


def case_of(
    settings: PlanSettings, model: PiecewiseModel, sessions: Sequence[Session]
) -> tuple[PlanCase, dict[int, str]]:
    """The case to plan, and the unusable degrees with the reasons.

    Raises:
        UserError: no layout of the GPUs takes the sessions.
    """
    wanted = parse_degrees(settings.degrees)
    limit = Limit.of(model.profile.max_context_tokens or 0, 0)
    _require_fitting(settings, sessions, limit)
    longest = max(session.max_context_tokens for session in sessions)
    longest = min(longest, limit.tokens) if limit else longest
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
        settings.pools,
        SimulationOptions(seed=settings.seed, max_wait=MAX_WAIT),
        {degree: tokens for degree in fitting if (tokens := settings.kv_store_of(model, Parallelism(degree)))},
        settings.attainment,
    )
    known = {theta.tp for theta in model.parallelisms}
    left_out = {}
    for degree in wanted:
        if degree in capacities and degree not in fitting:
            left_out[degree] = f"the KV memory of a replica does not hold the longest session ({longest} tokens)"
        elif degree not in known and degree <= settings.gpus:
            left_out[degree] = "the weights do not fit, or the performance model has no times for it"
    return case, left_out


def _require_fitting(settings: PlanSettings, sessions: Sequence[Session], limit: Limit | None) -> None:
    """Name the sessions that do not fit. A plan has no answer if their rounds alone miss the attainment.

    Raises:
        UserError: it has none.
    """
    line = misfits(sessions, limit)
    if limit is None or line is None:
        return
    rounds = sum(len(session.rounds) for session in sessions)
    share = sum(map(partial(_served, limit.tokens), sessions)) / rounds
    if share < settings.attainment:
        raise UserError(
            f"{settings.trace}: no layout reaches {settings.attainment:.0%} of the rounds, because {line}; that leaves "
            f"{share:.1%} of the rounds (give --context or another model)"
        )
    print(f"{PROG}: {line} (give --context or another model)", file=sys.stderr)


def _served(limit_tokens: int, session: Session) -> int:
    """Rounds before the first one that is too long, which ends its session."""
    sizes = [
        history + increment + item.output_tokens
        for (history, increment), item in zip(session.prompts_tokens(), session.rounds, strict=True)
    ]
    return next((index for index, size in enumerate(sizes) if size > limit_tokens), len(sizes))


def _capacities(settings: PlanSettings, model: PiecewiseModel, wanted: Sequence[int]) -> dict[int, int]:
    """KV memory by degree, of the degrees that the GPUs take."""
    known = {theta.tp: theta for theta in model.parallelisms}
    usable = [known[degree] for degree in wanted if degree in known]
    if not usable:
        raise UserError(
            f"--degrees: {model.name} fits or is known at TP {', '.join(map(str, known))}, not at {settings.degrees}"
        )
    model.require(usable, usable)
    smallest = min(theta.tp for theta in usable)
    if settings.gpus < smallest:
        raise UserError(f"--gpus: {settings.gpus} is too few: a replica of {model.name} needs {smallest}")
    return {theta.tp: settings.kv_capacity_of(model, theta) for theta in usable if theta.tp <= settings.gpus}


def _fitting(settings: PlanSettings, capacities: dict[int, int], longest: int) -> dict[int, int]:
    """The capacities that hold the longest session."""
    fitting = {degree: tokens for degree, tokens in capacities.items() if not 0 < tokens < longest}
    if not fitting:
        raise UserError(
            f"{settings.trace}: its longest session has {longest} tokens, the KV memory of a replica holds at most "
            f"{max(capacities.values())}; more GPUs per replica, or fewer tokens"
        )
    return fitting


_MOST_DEGREE = 1 << 20
"""Beyond it, numbers of GPUs and of heads are only mistyped."""


def parse_degrees(text: str) -> list[int]:
    """Numbers of GPUs per replica from a comma-separated list.

    Raises:
        UserError: a part is none.
    """
    try:
        degrees = sorted({int(part) for part in text.split(",")})
    except ValueError:
        degrees = []
    if not degrees or degrees[0] < 1 or degrees[-1] > _MOST_DEGREE:
        raise UserError(f"--degrees: give positive numbers (at most {_MOST_DEGREE}), as 1,2,4,8 (given: {text!r})")
    return degrees


def _own_rate(sessions: Sequence[Session], trace: str) -> float:
    span_s = sessions[-1].arrival_s - sessions[0].arrival_s
    if span_s <= 0:
        raise UserError(f"--rate is missing: the sessions of {trace} all arrive at once, so it has no rate of its own")
    rate = (len(sessions) - 1) / span_s
    print(f"{PROG}: planning for the trace's own rate, {format_number(rate)} sessions/s", file=sys.stderr)
    return rate


# -- the result, as `--json` prints it

_HOUR_S = 3600


def planned(
    settings: PlanSettings, case: PlanCase, left_out: Mapping[int, str], model: PiecewiseModel, argv: Sequence[str]
) -> tuple[dict[str, Any], list[Layout]]:
    """The object that `--json` prints, and the layouts, best first. `argv`: the arguments of the command."""
    plan = make_plan(case, Wishes(settings.use_all, settings.top, settings.jobs, settings.budget_s))
    demand = demand_of(replace(case, rate=plan.rate))
    slacks = [slack_of(each, plan, case, demand) for each in plan.layouts]
    result = {
        "kind": "plan",
        "layouts": [
            _layout(each, slack, plan, case) | _cost(each, plan.rate, settings)
            for each, slack in zip(plan.layouts, slacks, strict=True)
        ],
        "summary": answer(plan, case),
        "explanation": sentences(plan, case, left_out, slacks[0] if slacks else None),
        "meets_slo": plan.carries,
        "more_load": _more_load(plan),
        "series": {"tried": _tried(plan, case)},
        "attainment_level": case.attainment,
        "gpus": case.gpus,
        "rate": plan.rate,
        "slo": {"ttft": case.slo.ttft_s, "itl": case.slo.itl_s},
        "routing": case.routing,
        "ordering": case.ordering,
        "slicing": case.slicing,
        "pools": case.pools,
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


def _tried(plan: Plan, case: PlanCase) -> list[dict[str, Any]]:
    """Throughput and speed of all simulations of the search that ran to their end, of the first seed of each rate."""
    firsts: dict[tuple[Layout, float], Trial] = {}
    for candidate in plan.tried:
        for (rate, _), trial in sorted(candidate.trials.items(), key=lambda item: item[0]):
            if trial.tokens_per_s_per_user:
                firsts.setdefault((candidate.layout, rate), trial)
    return [
        {
            "layout": str(layout),
            "rate": rate,
            "tokens_per_s_per_gpu": float(f"{trial.tokens_per_s / layout.gpus:.4g}"),
            "tokens_per_s_per_user": float(f"{trial.tokens_per_s_per_user:.4g}"),
            "carries": trial.carries(case.attainment),
        }
        for (layout, rate), trial in firsts.items()
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


# -- the result as text for people

_HEAD = ("layout", "GPUs", "carries", "attained", "TTFT P95", "mean ITL P95", "local")


def plan_table(result: dict[str, Any]) -> str:
    """The text of a plan. `result`: as `ampd plan --json` prints it. Without a layout it has the explanation only."""
    if not result["layouts"]:
        return "\n".join(result["explanation"])
    has_price = result["gpu_price"] is not None
    head = (*_HEAD, "per hour") if has_price else _HEAD
    table = [head, *(_row(layout) for layout in result["layouts"])]
    slo = result["slo"]
    rate = rate_text(result["rate"])
    title = (
        f"{counted(result['gpus'], 'GPU')}, attained at {rate} sessions/s, TTFT {slo['ttft'] * 1e3:g} ms, "
        f"ITL {slo['itl'] * 1e3:g} ms: planned in {result['seconds']:.1f} s"
    )
    written = [f"Manifest: {result['manifest']}"] if result["manifest"] else []
    return "\n".join([title, "", text_table(table), "", *result["explanation"], *written])


def _row(layout: dict[str, Any]) -> tuple[str, ...]:
    simulated, goodput = layout["simulated"], layout["goodput"]
    price = [f"{layout['price_per_hour']:.2f}"] if "price_per_hour" in layout else []
    return (
        layout_label(layout),
        str(layout["gpus"]),
        "-" if goodput is None else f"{format_number(goodput['mean'])}/s",
        format_share(layout["attainment"]["mean"]),
        f"{(simulated['ttft_s']['p95'] or 0) * 1e3:.0f} ms",
        f"{(simulated['mean_itl_s']['p95'] or 0) * 1e3:.1f} ms",
        format_share(local_share(simulated), 0),
        *price,
    )
