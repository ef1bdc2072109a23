"""The routing table: exact look-ups at the edges of its buckets, the shipped table, fair shares."""

import pickle
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ampd_rivals.ppd.table_file import DEFAULT_TABLE, RoutingTable, parse_table, read_table
from hypothesis import given
from hypothesis import strategies as st

from ampd.errors import UserError
from ampd.perf.presets import load_performance_model
from ampd.policies.registry import create, create_named
from ampd.types import Parallelism, PrefillTask, Role, Route, RouteDecision, Slo, WorkerView
from benchmarks.routing_table.table_file import FittedOn, dump_table, with_routes, write_table
from tests.ampd.policies import situations

from .table_lab import document

MODEL = load_performance_model("qwen3-32b-h20")
TP4 = Parallelism(4)
SLO = Slo(ttft_s=1.0, itl_s=0.04)
DECODE = WorkerView("d", Role.DECODE, TP4)


def task(hist_tokens: int = 0, incr_tokens: int = 1, slo: Slo = SLO) -> PrefillTask:
    return PrefillTask("t", "s", hist_tokens, incr_tokens, 0.0, slo)


def worker(name: str = "p", *incr_tokens: int) -> WorkerView:
    queue = tuple(PrefillTask(f"q{i}", f"o{i}", 0, incr, 0.0, SLO) for i, incr in enumerate(incr_tokens))
    return WorkerView(name, Role.PREFILL, TP4, queue)


def route(
    routed: PrefillTask, table: Any, *workers: WorkerView, seed: int = 0, output_tokens: float | None = None
) -> RouteDecision:
    policy = create("routing", "table", table=table, output_tokens=output_tokens)
    return situations.route(policy, routed, DECODE, workers or (worker(),), MODEL, 0.0, random.Random(seed))


@pytest.mark.parametrize(
    ("hist_tokens", "incr_tokens", "place"),
    [
        (0, 1, (0, 0)),
        (0, 99, (0, 0)),
        (0, 100, (0, 1)),
        (1, 99, (1, 0)),
        (4999, 999, (1, 1)),
        (4999, 1000, (1, 2)),
        (5000, 999, (2, 1)),
        (30_000, 9000, (2, 2)),
    ],
)
def test_a_bucket_begins_at_its_first_value(hist_tokens: int, incr_tokens: int, place: tuple[int, int]) -> None:
    routed = task(hist_tokens, incr_tokens)
    assert route(routed, document((*place, 0, 0))).reason == "table-local"
    others = [(c, i, 0, 0) for c in range(3) for i in range(3) if (c, i) != place]
    assert route(routed, document(*others)).reason == "table-remote"


def test_load_is_the_least_queue_over_the_ttft_target() -> None:
    busy = worker("p", 4000, 300)
    queue_s = MODEL.prefill_s(0, 4000, TP4) + MODEL.prefill_s(0, 300, TP4)
    table = document((0, 0, 0, 1))
    at_half, above = Slo(2 * queue_s, 1.0), Slo(2.001 * queue_s, 1.0)
    assert route(task(slo=at_half), table, busy).route is Route.LOCAL
    assert route(task(slo=above), table, busy).route is Route.REMOTE
    # Another prefill worker without a queue: no load.
    decision = route(task(slo=at_half), table, busy, worker("idle"))
    assert (decision.route, decision.worker_id) == (Route.REMOTE, "idle")


def test_output_is_the_tables_estimate_or_the_parameter() -> None:
    table = document((0, 0, 1, 0))
    assert route(task(), table).route is Route.REMOTE
    assert route(task(), table, output_tokens=199.9).route is Route.REMOTE
    assert route(task(), table, output_tokens=200).route is Route.LOCAL
    assert route(task(), table | {"expected_output_tokens": 200}).route is Route.LOCAL


def test_the_decision_records_the_prefill_workers() -> None:
    for table, reason, chosen in ((document((0, 0, 0, 0)), "table-local", "d"), (document(), "table-remote", "b")):
        decision = route(task(), table, worker("a", 70), worker("b", 60))
        assert (decision.reason, decision.worker_id) == (reason, chosen)
        assert [estimate.worker_id for estimate in decision.estimates] == ["a", "b"]


def test_equal_workers_get_equal_shares() -> None:
    workers = [worker("busy", 10), *(worker(name) for name in "abc")]
    chosen = Counter(route(task(), document(), *workers, seed=seed).worker_id for seed in range(900))
    assert chosen.keys() == set("abc")
    assert min(chosen.values()) > 240


tokens = st.integers(0, 20_000)


@given(tokens, tokens, st.floats(1, 1000), st.floats(0, 2), st.data())
def test_every_round_has_one_cell_and_its_row_says_so(
    context: int, increment: int, output: float, load: float, data: st.DataObject
) -> None:
    routes = tuple(data.draw(st.lists(st.sampled_from(Route), min_size=36, max_size=36)))
    table = with_routes(parse_table(document()), routes)
    assert table.routes == routes
    row = max(
        (
            row
            for row in table.rows
            if row.context_tokens_from <= context
            and row.increment_tokens_from <= increment
            and row.output_tokens_from <= output
        ),
        key=lambda row: (row.context_tokens_from, row.increment_tokens_from, row.output_tokens_from),
    )
    assert table.routes[table.cell(context, increment, output, load)] is row.by_load[load >= 0.5]


def test_a_file_is_read_back_equal_and_once(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table = parse_table(document((1, 1, 0, 0)))
    write_table(table, path)
    assert read_table(path) == table
    assert path.read_text().count("\n") == len(table.rows) + 11
    policy = create_named("routing", f"table(table={path})")
    path.unlink()
    again = pickle.loads(pickle.dumps(policy))
    for table_policy in (policy, again):
        decision = situations.route(table_policy, task(1, 100), DECODE, [worker()], MODEL, 0.0, random.Random(0))
        assert decision.route is Route.LOCAL


def test_the_shipped_table_says_what_it_was_fitted_on() -> None:
    table = read_table(DEFAULT_TABLE)
    fitted = FittedOn.model_validate(table.fitted_on)
    assert fitted.performance_model == "qwen3-32b-h20"
    for prefix in ("", "fresh_"):
        counts = {name: fitted.rounds_attained[f"{prefix}{name}"] for name in ("table", "all_remote", "all_local")}
        assert counts["table"] > max(counts["all_remote"], counts["all_local"])
    assert set(table.routes) == set(Route)
    assert dump_table(table) == DEFAULT_TABLE.read_text()
    assert create("routing", "table") == create("routing", "table", table="default")
    assert route(task(30_000, 50), "default", replace(worker(), held_tokens={"s": 30_000})).reason.startswith("table-")


@pytest.mark.parametrize("parameters", [{"table": 3}, {"output_tokens": 0}])
def test_a_wrong_parameter_is_one_line(parameters: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="routing policy table: ") as caught:
        create("routing", "table", **parameters)
    assert "\n" not in str(caught.value)


def test_a_table_may_be_given_as_an_object() -> None:
    table = parse_table(document((0, 0, 0, 0)))
    assert isinstance(table, RoutingTable)
    assert route(task(), table) == route(task(), document((0, 0, 0, 0)))
