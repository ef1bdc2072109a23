"""Fitting a routing table: never worse than one route for all, the same every time, and right where it is plain."""

from dataclasses import replace

import pytest
from ampd_rivals.ppd.table import TableRouting

from ampd.errors import UserError
from ampd.perf.presets import analytic_model
from ampd.policies.registry import create
from ampd.types import Parallelism, Route, Slo
from benchmarks.routing_table.case import FitCase, blank_table, scaled
from benchmarks.routing_table.search import fit_table
from benchmarks.routing_table.trial import rounds_attained
from planner.simulator.options import Cluster, ReplicaGroup
from workloads.trace import Round, Session

pytestmark = pytest.mark.long

MODEL = analytic_model("llama-3.1-8b", "h20")


def cluster(prefill: int, decode: int) -> Cluster:
    return Cluster((ReplicaGroup(1, Parallelism(decode)),), (ReplicaGroup(1, Parallelism(prefill)),))


def sessions(first: int, later: int, output: int, tool_s: float = 0.5, rounds: int = 4) -> tuple[Session, ...]:
    """Equal ones; lengths vary a little, so that there are ranges to tell apart."""
    return tuple(
        Session(
            session_id=f"s{number}",
            arrival_s=number,
            rounds=tuple(
                Round(
                    incr_tokens=(later if index else first) + 10 * (number % 4) + index,
                    output_tokens=output,
                    tool_s=tool_s if index else 0.0,
                )
                for index in range(rounds)
            ),
        )
        for number in range(12)
    )


BUSY = FitCase(
    sessions=sessions(3000, 200, 40),
    cluster=cluster(1, 1),
    model=MODEL,
    slo=Slo(0.5, 0.02),
    rates=(1.0, 2.0),
    limit=30,
    steps=30,
)
# A remote prefill takes longer than the target; the decode worker is strong and mostly idle.
SLOW_PREFILL = replace(BUSY, cluster=cluster(1, 8), sessions=sessions(6000, 6000, 10), slo=Slo(0.6, 1.0), rates=(0.2,))

ONE_ROUTE = ("all_remote", "all_local")


def one_route(case: FitCase, name: str) -> int:
    workloads = case.workloads(1, case.options.seed, case.rates)
    return rounds_attained(case, workloads, create("routing", name))


def test_it_attains_more_than_one_route_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    fit = fit_table(BUSY, jobs=1)
    counts = fit.rounds_attained
    assert counts["rounds"] == 2 * 30 * 4
    assert counts["all_remote"] == one_route(BUSY, "always-remote")
    assert counts["all_local"] == one_route(BUSY, "always-local")
    workloads = BUSY.workloads(1, BUSY.options.seed, BUSY.rates)
    # What is reported is what the finished table does, filled-in cells included.
    assert counts["table"] == rounds_attained(BUSY, workloads, TableRouting(table=fit.table))
    assert counts["table"] > max(counts["all_remote"], counts["all_local"])
    assert [counts[f"fresh_{name}"] for name in ONE_ROUTE] != [counts[name] for name in ONE_ROUTE]
    progress = capsys.readouterr()
    assert "from all remote: " in progress.err
    assert "from all local: " in progress.err
    assert progress.out == ""


def test_even_a_single_step_is_no_worse_than_either_start() -> None:
    for case, better in ((BUSY, "all_remote"), (SLOW_PREFILL, "all_local")):
        counts = fit_table(replace(case, steps=1), jobs=1).rounds_attained
        assert counts["table"] == counts[better]
        assert len({counts["all_remote"], counts["all_local"]}) == 2


def test_where_both_routes_are_as_good_it_stays_remote() -> None:
    fit = fit_table(replace(BUSY, slo=Slo(60.0, 60.0)), jobs=1)
    assert len(set(fit.rounds_attained.values())) == 1
    assert set(fit.table.routes) == {Route.REMOTE}


def test_the_same_case_gives_the_same_table_on_any_number_of_processes() -> None:
    case = replace(BUSY, steps=5)
    alone, parallel = (fit_table(case, jobs=jobs) for jobs in (1, 2))
    assert alone == parallel
    other = replace(case, options=replace(case.options, seed=1))
    assert fit_table(other, jobs=1).rounds_attained != alone.rounds_attained


def test_where_the_prefill_worker_is_far_too_slow_everything_is_local() -> None:
    fit = fit_table(SLOW_PREFILL, jobs=1)
    assert fit.rounds_attained["all_remote"] == 0
    assert fit.rounds_attained["table"] == fit.rounds_attained["rounds"]
    assert set(fit.table.routes) == {Route.LOCAL}


def test_where_local_prefills_break_every_batch_everything_is_remote() -> None:
    # The decode worker is small: a prefill there is late by itself; the prefill worker is strong.
    case = replace(BUSY, cluster=cluster(8, 1), sessions=sessions(6000, 6000, 30), slo=Slo(0.6, 1.0), rates=(0.2,))
    fit = fit_table(case, jobs=1)
    assert fit.rounds_attained["all_local"] == 0
    assert fit.rounds_attained["table"] == fit.rounds_attained["rounds"]
    assert set(fit.table.routes) == {Route.REMOTE}


def test_only_short_rounds_are_local_where_only_they_fit_there() -> None:
    # Half of the later rounds are short enough for the small decode worker; the prefill worker is too busy for all.
    mixed = tuple(
        session.model_copy(
            update={
                "rounds": tuple(
                    item.model_copy(update={"incr_tokens": 20 if index % 2 else 5000})
                    for index, item in enumerate(session.rounds)
                )
            }
        )
        for session in sessions(1, 1, 20, tool_s=0.1, rounds=8)
    )
    case = replace(BUSY, sessions=mixed, cluster=cluster(2, 1), slo=Slo(1.0, 0.1), rates=(0.5,), steps=60)
    fit = fit_table(case, jobs=1)
    counts = fit.rounds_attained
    assert counts["table"] > 1.05 * max(counts["all_remote"], counts["all_local"])
    table = fit.table
    long = table.routes[table.cell(0, 5000, 20, 0.0)]
    short_behind_a_queue = table.routes[table.cell(5020, 20, 20, 0.6)]
    assert (long, short_behind_a_queue) == (Route.REMOTE, Route.LOCAL)


def test_each_scale_of_outputs_has_its_range() -> None:
    case = replace(BUSY, output_scales=(0.25, 1.0, 4.0), steps=3)
    assert blank_table(case).output_tokens_from == (0, 20, 80)
    fit = fit_table(case, jobs=1)
    assert fit.table.expected_output_tokens == 40
    assert fit.rounds_attained["rounds"] == 3 * 2 * 30 * 4
    with pytest.raises(UserError, match="--output-scales: give factors"):
        blank_table(replace(case, output_scales=(1.0, 1.001)))


def test_scales_are_fitted_apart() -> None:
    case = replace(BUSY, steps=4)
    fitted = fit_table(replace(case, output_scales=(0.25, 4.0)), jobs=1).table
    for start, scale in zip(fitted.output_tokens_from, (0.25, 4.0), strict=True):
        alone = fit_table(replace(case, output_scales=(scale,)), jobs=1).table
        rows = [row for row in fitted.rows if row.output_tokens_from == start]
        assert [row.by_load for row in rows] == [row.by_load for row in alone.rows]


def test_scaled_sessions_stay_valid() -> None:
    kept = Session(
        session_id="s",
        arrival_s=0,
        rounds=(
            Round(incr_tokens=100, output_tokens=60),
            Round(incr_tokens=5, output_tokens=3, keep_tokens=150),
            Round(incr_tokens=5, output_tokens=1, keep_tokens=40),
        ),
    )
    for scale, keep_tokens in ((0.1, [None, 106, 40]), (1.0, [None, 150, 40]), (3.0, [None, 150, 40])):
        made = scaled(kept, scale)
        assert [item.keep_tokens for item in made.rounds] == keep_tokens
        assert made.rounds[0].output_tokens == round(60 * scale)
        Session.model_validate(made.model_dump())


def test_ranges_hold_as_many_rounds_each_and_initial_prefills_their_own() -> None:
    table = blank_table(BUSY)
    assert table.context_tokens_from[:2] == (0, 1)
    prompts = [pair for session in BUSY.sessions for pair in session.prompts_tokens()]
    for axis, values in (
        (table.context_tokens_from[1:], [context for context, _ in prompts if context]),
        (table.increment_tokens_from, [increment for _, increment in prompts]),
    ):
        shares = [
            sum(start <= value < end for value in values) / len(values)
            for start, end in zip(axis, (*axis[1:], 1 << 60), strict=True)
        ]
        assert len(shares) == 4
        assert min(shares) > 0.05
