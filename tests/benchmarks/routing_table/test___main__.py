"""`python -m benchmarks.routing_table`: the file it writes, and refusals in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ampd_rivals.ppd.table_file import parse_table, read_table

from ampd.cli.main import main
from ampd.errors import UserError
from benchmarks.routing_table.__main__ import parse_scales, run
from benchmarks.routing_table.table_file import FittedOn

BASE = ["tau-bench-airline", "--perf", "qwen3-32b-h20", "--prefill", "1xTP4", "--decode", "1xTP4"]
LIGHT = ["--rate", "2,4", "--ttft", "0.35", "--itl", "0.04", "--limit", "10", "--steps", "5", "--jobs", "1"]


@pytest.mark.slow
def test_it_writes_a_table_that_simulate_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.json"
    assert run([*BASE, *LIGHT, "--seed", "3", "--output", str(path)]) == 0
    fitted = FittedOn.model_validate(read_table(path).fitted_on)
    assert (fitted.trace, fitted.sessions, fitted.seed) == ("tau-bench-airline", 10, 3)
    assert (fitted.performance_model, fitted.cluster) == ("qwen3-32b-h20", "prefill 1xTP4, decode 1xTP4")
    assert (fitted.ttft_slo_s, fitted.itl_slo_s, fitted.rates_per_s) == (0.35, 0.04, (2.0, 4.0))
    assert (fitted.binding, fitted.ordering, fitted.slicing) == ("least-kv", "ampd", "whole")
    out = capsys.readouterr()
    assert out.out == ""
    counts = fitted.rounds_attained
    assert f"rounds attained of {counts['rounds']}, fitted arrivals: table {counts['table']}, all remote" in out.err
    assert "fresh arrivals: table" in out.err
    assert str(tmp_path) not in path.read_text()
    # What the file says it attains is what the command line's simulation attains with it.
    flags = [*BASE, "--rate", "2,4", "--ttft", "0.35", "--itl", "0.04", "--limit", "10", "--seed", "3", "--json"]
    assert (
        main(
            [
                "simulate",
                *flags,
                "--routing",
                f"table(table={path}, output_tokens=52.857)",
                "--ordering",
                "ampd",
                "--slicing",
                "whole",
                "--pools",
                "static",
                "--max-wait",
                "0",
                "--kv-store-gib-per-gpu",
                "0",
            ]
        )
        == 0
    )
    results = json.loads(capsys.readouterr().out)["results"]
    attained = sum(result["attainment"]["rounds"] * result["rounds"] for result in results)
    assert round(attained) == counts["table"]


def test_without_a_file_it_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BASE, "--ttft", "0.35", "--itl", "0.04", "--limit", "6", "--steps", "1", "--jobs", "1"]) == 0
    table = parse_table(json.loads(capsys.readouterr().out))
    fitted = FittedOn.model_validate(table.fitted_on)
    assert fitted.rates_per_s == (None,)
    # Arrivals that are the trace's own cannot be drawn anew.
    assert set(fitted.rounds_attained) == {"rounds", "table", "all_remote", "all_local"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefill", "0"], r"--prefill: a table chooses between two kinds of workers"),
        (["--decode", "none"], r"--decode: a table chooses"),
        (["--rate", "0"], r"--rate: give positive numbers"),
        (["--output-scales", "1,x"], r"--output-scales: give positive factors, as 0\.25,1,4 \(given: '1,x'\)"),
        (["--output-scales", "1,1"], r"--output-scales: give factors that grow"),
        (["--ordering", "best"], r"unknown ordering policy"),
        (["--slicing", "best"], r"unknown slicing policy"),
        (["--steps", "0"], r"--steps"),
        (["--output", "/nowhere/table.json"], r"/nowhere/table\.json: cannot be written"),
    ],
)
def test_a_wrong_call_is_one_line(flags: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        run([*BASE, *LIGHT, *flags])
    assert "\n" not in str(caught.value)


def test_scales_are_sorted() -> None:
    assert parse_scales("4,0.25, 1") == (0.25, 1.0, 4.0)


@pytest.mark.slow
def test_the_module_runs_and_reports_an_error_in_one_line() -> None:
    called = [sys.executable, "-m", "benchmarks.routing_table", "nowhere.jsonl", *BASE[1:]]
    done = subprocess.run(called, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "nowhere.jsonl: no such trace file" in done.stderr
