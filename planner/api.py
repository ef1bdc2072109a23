"""The Python API: `from ampd import simulate, plan, load_trace, load_result, UserError` (docs/api.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ampd.documents import first_problem
from ampd.errors import UserError, did_you_mean
from planner.case_settings import CaseSettings, PlanSettings
from planner.layout.layout import layout_label
from planner.plan_command import case_of as plan_case_of
from planner.plan_command import planned
from planner.simulate_command import SimulateSettings, case_of, result_of, run_combination
from workloads.trace import Session, load_trace, parse_json

__all__ = ["PlanResult", "RunResult", "Session", "UserError", "load_result", "load_trace", "plan", "simulate"]

Trace = str | Path | Sequence[Session]
"""A file, the name of a shipped trace, or sessions."""

_IN_MEMORY = "in memory"
"""The name of a trace that was given as sessions."""
_OUTPUTS = frozenset({"trace", "as_json", "report", "timeline", "output_manifest", "fail_under", "force"})
"""Settings of the commands that a function has no use for."""


class Percentiles(BaseModel):
    """Of a latency in seconds; None: there was none."""

    model_config = ConfigDict(frozen=True)

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None


class Attained(BaseModel):
    """The shares that met both targets; None: there were no targets, or nothing ended."""

    model_config = ConfigDict(frozen=True)

    rounds: float | None
    sessions: float | None


class Estimate(BaseModel):
    """A mean over seeds with its 95 % interval; None: one seed has no interval."""

    model_config = ConfigDict(frozen=True)

    mean: float
    low: float | None
    high: float | None


class _Result(BaseModel):
    """A part of what a command prints with `--json`, as attributes; `document` has all of it."""

    model_config = ConfigDict(frozen=True)

    document: dict[str, Any]

    @classmethod
    def of(cls: type[_ResultT], document: dict[str, Any]) -> _ResultT:
        """The result that a document has.

        Raises:
            ValidationError: a key is missing or has another type.
        """
        return cls.model_validate(document | {"document": document})


_ResultT = TypeVar("_ResultT", bound=_Result)


class RunResult(_Result):
    """A simulation or a replay.

    Attributes:
        records: one mapping a round, in order of its end.
        routes: rounds by route, `local` or `remote`.
    """

    attainment: Attained
    ttft_s: Percentiles
    ttft_initial_s: Percentiles
    ttft_incremental_s: Percentiles
    itl_s: Percentiles
    mean_itl_s: Percentiles
    e2e_s: Percentiles
    routes: dict[str, int]
    rounds: int
    sessions: int
    errors: int
    output_tokens: int
    duration_s: float
    records: tuple[dict[str, Any], ...] = ()

    def to_frame(self) -> Any:
        """A pandas DataFrame with a line per round. Raises `UserError` without pandas."""
        return _frame(self.records)


class PlannedLayout(_Result):
    """One layout of a plan, at the plan's rate.

    Attributes:
        goodput: sessions per second that it carries; None: it is not known.
    """

    gpus: int
    meets_slo: bool
    attainment: Estimate
    goodput: Estimate | None

    def __str__(self) -> str:
        return layout_label(self.document)


class PlanResult(_Result):
    """A plan; `layouts` has the best one first, and is empty if no layout carries any rate.

    Attributes:
        rate: sessions per second.
        meets_slo: the best layout carries the rate.
    """

    layouts: tuple[PlannedLayout, ...]
    summary: str
    rate: float
    meets_slo: bool

    def to_frame(self) -> Any:
        """A pandas DataFrame with a line per layout. Raises `UserError` without pandas."""
        return _frame([_layout_row(layout) for layout in self.layouts])


def simulate(
    trace: Trace,
    *,
    model: str | None = None,
    gpu: str | None = None,
    perf: str | None = None,
    prefill: str | None = None,
    decode: str | None = None,
    rate: float | None = None,
    limit: int | None = None,
    ttft: float | None = None,
    itl: float | None = None,
    **flags: Any,
) -> RunResult:
    """Simulate how a cluster serves a trace. Arguments are the flags of `ampd simulate`, of which each names one value.

    Raises:
        UserError: an argument is unknown or does not fit.
    """
    named = {"model": model, "gpu": gpu, "perf": perf, "prefill": prefill, "decode": decode, "limit": limit}
    times = {"rate": None if rate is None else str(rate), "ttft": ttft, "itl": itl}
    settings = _settings(SimulateSettings, "simulate", trace, named | times | flags)
    scene, combinations = case_of(settings, _sessions(trace, settings.limit))
    if len(combinations) > 1:
        raise UserError(f"simulate(): one call makes one simulation, these arguments name {len(combinations)}")
    run = run_combination(scene, combinations[0])
    records = tuple({"round": row.pop("index"), **row} for row in map(asdict, run.rounds))
    return RunResult.of(result_of(scene, combinations[0], run) | {"records": records})


def plan(
    trace: Trace,
    *,
    gpus: int,
    model: str | None = None,
    gpu: str | None = None,
    perf: str | None = None,
    rate: float | None = None,
    ttft: float | None = None,
    itl: float | None = None,
    **flags: Any,
) -> PlanResult:
    """Find the layout that serves a trace best. Arguments are the flags of `ampd plan`.

    Raises:
        UserError: an argument is unknown or does not fit, or no layout takes the sessions.
    """
    named = {"gpus": gpus, "model": model, "gpu": gpu, "perf": perf, "rate": rate, "ttft": ttft, "itl": itl}
    settings = _settings(PlanSettings, "plan", trace, named | flags)
    performance = settings.performance_model()
    case, left_out = plan_case_of(settings, performance, _sessions(trace, settings.limit))
    given = {name: value for name, value in (named | flags).items() if value is not None}
    argv = [settings.trace, *(f"--{name.replace('_', '-')}={value}" for name, value in given.items())]
    document, _ = planned(settings, case, left_out, performance, argv)
    return _plan_of(document)


def load_result(path: str | Path) -> RunResult | PlanResult:
    """The result in a file that `ampd replay --json`, `ampd simulate --json` or `ampd plan --json` wrote.

    Raises:
        UserError: the file cannot be read, or has something else, or several simulations.
    """
    try:
        document = parse_json(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    try:
        return _plan_of(document) if "layouts" in document else RunResult.of(document)
    except (ValidationError, TypeError):
        raise UserError(f"{path}: is not the JSON of one replay, one simulation or one plan") from None


def _plan_of(document: dict[str, Any]) -> PlanResult:
    layouts = tuple(PlannedLayout.of(layout) for layout in document["layouts"])
    return PlanResult(
        document=document,
        layouts=layouts,
        summary=document["summary"],
        rate=document["rate"],
        meets_slo=document["meets_slo"],
    )


_CaseT = TypeVar("_CaseT", bound=CaseSettings)


def _settings(kind: type[_CaseT], function: str, trace: Trace, given: Mapping[str, Any]) -> _CaseT:
    known = set(kind.model_fields) - _OUTPUTS
    for name in given.keys() - known:
        raise UserError(f"{function}(): unknown argument {name!r}{did_you_mean(name, known)}")
    named = {name: value for name, value in given.items() if value is not None}
    try:
        return kind(trace=str(trace) if isinstance(trace, str | Path) else _IN_MEMORY, **named)
    except ValidationError as error:
        raise UserError(f"{function}(): {first_problem(error)}") from None


def _sessions(trace: Trace, limit: int | None) -> Sequence[Session]:
    if isinstance(trace, str | Path):
        return load_trace(str(trace), limit)
    if not trace:
        raise UserError("there is no session to serve")
    return sorted(trace, key=lambda session: session.arrival_s)[:limit]


def _layout_row(layout: PlannedLayout) -> dict[str, Any]:
    simulated = layout.document["simulated"]
    return {
        "layout": str(layout),
        "gpus": layout.gpus,
        "goodput": layout.goodput and layout.goodput.mean,
        "attainment": layout.attainment.mean,
        "ttft_p95_s": simulated["ttft_s"]["p95"],
        "mean_itl_p95_s": simulated["mean_itl_s"]["p95"],
    }


def _frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise UserError("to_frame() needs the package pandas (pip install pandas)") from None
    return pandas.DataFrame(list(rows))
