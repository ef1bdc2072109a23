"""Cells of the matrix on a live graph: the fast part of what `python -m benchmarks.faults` runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from benchmarks.commit import UNKNOWN
from benchmarks.faults import __main__ as main
from benchmarks.faults import cell
from benchmarks.faults.__main__ import Records, run
from benchmarks.faults.cell import CellResult, CellRunner
from benchmarks.faults.cluster import live_graph
from benchmarks.faults.fault import Fault
from benchmarks.faults.faults import FAULTS
from benchmarks.faults.kv_faults import SABOTAGE
from benchmarks.faults.matrix import tables
from benchmarks.faults.moments import Moment
from benchmarks.faults.setting import modelled
from tests.waiting import PATIENCE_S

CELLS = {
    Moment.PREFILLING: ("kill-prefill",),
    Moment.DECODING: ("redis-full",),
}


@pytest.mark.long
@pytest.mark.parametrize("moment", list(CELLS))
async def test_no_round_is_lost_and_no_token_is_wrong(
    tmp_path: Path, moment: Moment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine is slow, and nothing is lost by that.
    monkeypatch.setattr(cell, "BOUND_S", PATIENCE_S)
    monkeypatch.setattr(cell, "IDLE_WITHIN_S", PATIENCE_S)
    faults = [FAULTS[name] for name in CELLS[moment]]
    results = await run(tmp_path, faults, [moment], repeats=1)
    assert [result.fault for result in results] == ["none", *CELLS[moment]]
    for result in results:
        assert result.violations == []
        assert (result.failed, result.lost, result.wrong) == (0, 0, 0)
        assert result.completed == result.accepted > 0


@pytest.mark.slow
async def test_a_stream_goes_on_without_a_wrong_token_when_its_decode_worker_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one cell of `make test`, which may take longer than its other tests. No other cell says as much."""
    monkeypatch.setattr(cell, "BOUND_S", PATIENCE_S)
    monkeypatch.setattr(cell, "IDLE_WITHIN_S", PATIENCE_S)
    setting = modelled()
    async with live_graph(tmp_path, setting.kind) as graph:
        runner = setting.runner(graph)
        await runner.start()
        result = await runner.run(FAULTS["kill-decode"], Moment.DECODING)
    assert result.violations == []
    assert (result.failed, result.lost, result.wrong) == (0, 0, 0)
    assert result.completed == result.accepted > 0


@pytest.mark.long
async def test_broken_workers_are_reported(tmp_path: Path) -> None:
    results = await run(tmp_path, SABOTAGE, [Moment.WAITING], repeats=1)
    _, leaks, repeats = results
    assert any(violation.endswith(" protected requests") for violation in leaks.violations)
    assert (leaks.lost, leaks.wrong) == (0, 0)
    assert repeats.wrong > 0
    assert any("instead of" in violation for violation in repeats.violations)


def test_runs_that_took_longer_than_their_aim_are_marked() -> None:
    usual, moment = CellResult("none", Moment.DECODING.value, recover_s=0.4), Moment.DECODING.value
    results = [
        usual,
        CellResult("kill-decode", moment, accepted=5, completed=5, recover_s=1.5, lag_s=0.2),
        CellResult("kill-prefill", moment, accepted=5, completed=5, recover_s=1.7, lag_s=0.2),
        CellResult("kv-refused", moment, accepted=5, completed=5, recover_s=2.8),
    ]
    text = tables(results, FAULTS)
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    assert "| 1 s | 5/5, 1.1 s |" in rows["kill-decode"], "the harness itself was late by more"
    assert "| 1 s | 5/5, 1.3 s **late** |" in rows["kill-prefill"]
    assert "| 2.5 s | 5/5, 2.4 s |" in rows["kv-refused"]
    assert "longer to recover than their aim: 1." in text
    heads = [line for line in text.splitlines() if line.startswith("| fault")]
    assert {line.count("|") for line in heads} == {line.count("|") for line in rows.values()}


def test_each_table_names_the_commits_of_its_runs() -> None:
    moment = Moment.DECODING.value
    results = [
        CellResult("none", moment, commit="aaaaaaa"),
        CellResult("kill-decode", moment, commit="bbbbbbb"),
        CellResult("kill-prefill", moment, commit="ccccccc-dirty"),
        CellResult("stop-decode", moment, commit="bbbbbbb"),
        CellResult("kv-refused", moment),
    ]
    lines = [line for line in tables(results, FAULTS).splitlines() if line.startswith("Commit")]
    assert lines == ["Commit: aaaaaaa.", "Commit: bbbbbbb, ccccccc-dirty.", "Commit: unknown."]


async def test_records_hold_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "commit", lambda: "aaaaaaa")

    class Runner:
        async def run(self, fault: Fault, moment: Moment) -> CellResult:
            return CellResult(fault.name, moment.value)

    result = await main._run_cell(cast(CellRunner, Runner()), FAULTS["kill-decode"], Moment.DECODING)
    file, cell_of_it = tmp_path / "records", (FAULTS["kill-decode"], Moment.DECODING)
    Records(file).add(result)
    (read,) = Records(file).take([cell_of_it])
    assert read.commit == "aaaaaaa"
    older = {name: value for name, value in json.loads(file.read_text()).items() if name != "commit"}
    file.write_text(json.dumps(older) + "\n")
    (read,) = Records(file).take([cell_of_it])
    assert read.commit == UNKNOWN
