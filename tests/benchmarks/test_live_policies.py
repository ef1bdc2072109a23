"""The contest on a live graph: policies that switch, roles that come back, and a whole run with modelled engines."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ampd.perf.presets import load_performance_model
from ampd.policies.base import Run
from ampd.policies.pools.predictive import PredictivePools
from ampd.policies.registry import Kind
from ampd.types import Parallelism, PrefillTask, Role, Route, Slo, WorkerView
from benchmarks.live_policies import main
from benchmarks.switched import (
    SwitchedOrdering,
    SwitchedPools,
    SwitchedRouting,
    switch,
    switched_flags,
)
from tests.ampd.policies import situations

MODEL = load_performance_model("tiny-cpu")
SLO = Slo(1.0, 0.02)
PREFILL, DECODE = WorkerView("p", Role.PREFILL), WorkerView("d", Role.DECODE)


def _policies(**changed: str) -> dict[Kind, str]:
    usual: dict[Kind, str] = {
        "binding": "least-kv",
        "routing": "always-remote",
        "ordering": "fcfs",
        "slicing": "whole",
        "pools": "static",
    }
    return usual | {kind: changed[kind] for kind in usual.keys() & changed.keys()}


def _task(name: str, incr_tokens: int = 64) -> PrefillTask:
    return PrefillTask(name, name, 0, incr_tokens, 0.0, SLO)


def test_a_switch_holds_from_the_next_decision_on(tmp_path: Path) -> None:
    file = tmp_path / "switch.json"
    routing, ordering = SwitchedRouting(file=file), SwitchedOrdering(file=file)
    queue = [_task("long", 900), _task("short", 16)]
    seen = []
    for policies in (
        _policies(),
        _policies(routing="always-local", ordering="shortest-prefill-first"),
        _policies(),
    ):
        switch(file, policies, prefill=1, slo=SLO)
        decision = situations.route(routing, _task("a"), DECODE, [PREFILL], MODEL, 0.0, random.Random(0))
        picked = situations.pick(ordering, queue, Parallelism(), MODEL, 0.0, random.Random(0))
        assert isinstance(picked, Run)
        seen.append((decision.route, picked.index))
    assert seen == [(Route.REMOTE, 0), (Route.LOCAL, 1), (Route.REMOTE, 0)]


@pytest.mark.parametrize(("roles", "changes"), [("pd", ""), ("dd", "p"), ("ddd", "p"), ("ppd", "d"), ("pp", "d")])
def test_static_pools_bring_the_roles_of_the_start_back(tmp_path: Path, roles: str, changes: str) -> None:
    file = tmp_path / "switch.json"
    switch(file, _policies(), prefill=1, slo=SLO)
    workers = [WorkerView(str(i), Role.PREFILL if role == "p" else Role.DECODE) for i, role in enumerate(roles)]
    got = situations.change(SwitchedPools(file=file), workers, Slo(9.0, 9.0), MODEL, 0.0, 0.0, random.Random(0))
    assert "".join(change.role[0] for change in got) == changes


def test_other_pools_are_asked_with_the_targets_of_the_contest(tmp_path: Path) -> None:
    file = tmp_path / "switch.json"
    switch(file, _policies(pools="predictive"), prefill=1, slo=Slo(1.0, 0.003))
    workers = [PREFILL, WorkerView("d", Role.DECODE, decode_batch=4, decode_context_tokens=4000)]
    # Under the graph's own loose targets nothing would be short.
    policy = PredictivePools()
    assert not situations.change(policy, workers, Slo(60.0, 60.0), MODEL, 99.0, 0.0, random.Random(0))
    got = situations.change(SwitchedPools(file=file), workers, Slo(60.0, 60.0), MODEL, 99.0, 0.0, random.Random(0))
    assert [(change.worker_id, change.role, change.reason) for change in got] == [("p", Role.DECODE, "itl-short")]


def test_every_kind_of_policy_of_a_graph_is_switched(tmp_path: Path) -> None:
    flags = switched_flags(tmp_path / "s.json")
    assert flags[::2] == ["--binding", "--routing", "--ordering", "--slicing", "--pools"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
def test_contestants_alternate_on_a_live_graph_of_modelled_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "records.json"
    argv = ["--engine", "modelled", "--perf", "tiny-cpu", "--layouts", "1+1", "--contestants"]
    argv += [
        "ours with fixed roles;co-located ours;always-remote;always-local",
        "--sessions",
        "3",
        "--rate",
        "1",
        "--runs",
        "1",
    ]
    argv += ["--calibration", "2", "--records", str(records), "--json"]
    assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    assert 0.2 < result["slo"]["ttft"] < 10.0
    assert result["overheads"]["1+1"]["dispatch_s"] > 0.0
    rows = {row["contestant"]: row for row in result["results"]}
    assert list(rows) == ["ours with fixed roles", "co-located ours", "always-remote", "always-local"]
    assert all(row["errors"] == 0 and 0.0 <= row["live"]["rounds_attained"] <= 1.0 for row in rows.values())
    # What is fixed by its policy goes the same way live and simulated: the switch has reached every process.
    for label, share, reason in (("always-remote", 0.0, "always-remote"), ("always-local", 1.0, "always-local")):
        row = rows[label]
        assert (row["live"]["local_share"], row["simulated"]["local_share"], row["routed_alike"]) == (share, share, 1.0)
        assert row["reasons"] == {reason: result["rounds"]}
    assert rows["co-located ours"]["live"]["local_share"] == 1.0, "the prefill worker has become a decode worker"
    assert all(row["live"]["role_changes"] == row["simulated"]["role_changes"] == 0 for row in rows.values())
    assert set(rows["ours with fixed roles"]["reasons"]) <= {"on-time", "fewest-late", "hopeless"}
    kept = [json.loads(line) for line in records.read_text().splitlines()]
    assert [run["contestant"] for run in kept] == list(rows)
    assert [len(run["records"]) for run in kept] == [result["rounds"]] * 4
