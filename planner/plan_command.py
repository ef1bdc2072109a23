"""`ampd plan`: the layout of a cluster for a workload, a model, a kind of GPU and targets."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from ampd.documents import check_writable
from ampd.errors import UserError
from ampd.perf.piecewise import PiecewiseModel
from ampd.policies.expectations import disagreement
from ampd.policies.registry import create_named
from ampd.reports.figures import format_number
from ampd.settings import parse_settings
from ampd.types import Parallelism
from planner.layout.case import PlanCase
from planner.manifest.planned import check_flags, write_plan
from planner.plan_result import planned
from planner.plan_settings import PlanSettings
from planner.plan_table import plan_table
from planner.simulator.options import SimulationOptions
from workloads.trace import Session, load_trace

PROG = "ampd plan"


def run(argv: Sequence[str]) -> int:
    """Plan and print.

    Raises:
        UserError: wrong flags, an unknown name, or GPUs that hold no replica, or not the KV of the longest session.
            After the plan is printed: its manifest cannot be written.
    """
    start_s = time.perf_counter()
    settings = parse_settings(PlanSettings, argv, PROG)
    for kind in ("routing", "ordering", "slicing"):
        create_named(kind, getattr(settings, kind))
    if warning := disagreement(settings.routing, settings.ordering):
        print(f"{PROG}: {warning}", file=sys.stderr)
    check_writable(settings.report)
    check_flags(settings)
    model = settings.performance_model()
    case, left_out = _case(settings, model)
    result, layouts = planned(settings, case, left_out, model, argv)
    result["seconds"] = time.perf_counter() - start_s
    error, needs = None, list[str]()
    try:
        result["manifest_warnings"], needs = write_plan(settings, layouts, model, result)
    except UserError as refused:
        # The plan took long, so it is shown all the same.
        error, result["manifest"] = refused, None
    for warning in result["manifest_warnings"]:
        print(f"{PROG}: {warning}", file=sys.stderr)
    print(json.dumps(result, indent=1) if settings.as_json else plan_table(result), flush=True)
    if needs and not settings.as_json:
        print("\n".join(needs), flush=True)
    if settings.report:
        from planner.plan_report import write_report

        write_report(settings.report, result)
    if error is not None:
        raise error
    return 0


def _case(settings: PlanSettings, model: PiecewiseModel) -> tuple[PlanCase, dict[int, str]]:
    """The case to plan, and the unusable degrees with the reasons."""
    sessions = load_trace(settings.trace, settings.limit)
    wanted = parse_degrees(settings.degrees)
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
        elif degree not in known and degree <= settings.gpus:
            left_out[degree] = "the weights do not fit, or the performance model has no times for it"
    return case, left_out


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
