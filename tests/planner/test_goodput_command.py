"""`ampd plan --use-all` and `--by-trials`: keys, report, manifest, and that the first needs no rate."""

import json
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.main import main

pytestmark = pytest.mark.usefixtures("short_trials")
MOST = ["plan", "tau-bench-airline", "--model", "llama-3.1-8b", "--gpu", "h100", "--gpus", "2", "--use-all"]
MOST += ["--ttft", "0.2", "--itl", "0.02", "--budget-s", "1000000"]


@pytest.mark.slow
def test_the_most_goodput_is_planned_without_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, manifest = tmp_path / "plan.html", tmp_path / "plan.yaml"
    assert main([*MOST, "--json", "--report", str(report), "--output-manifest", str(manifest)]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    best = plan["layouts"][0]
    assert best["gpus"] == 2
    assert best["goodput"]["low"] <= best["goodput"]["mean"] <= best["goodput"]["high"]
    assert 0 < plan["rate"] <= best["goodput"]["mean"]
    assert 0 < best["attainment"]["mean"] <= 1
    assert best["headroom"] == pytest.approx(best["goodput"]["mean"] / plan["rate"])
    assert {"prefill", "decode", "objective", "meets_slo", "slack", "simulated", "curve"} <= best.keys()
    assert plan["next_step"]["more_gpus"] == 1
    assert len(plan["variations"]) == 4
    assert plan["stopped"] is None
    assert any(line.startswith("What binds is") for line in plan["explanation"])
    page = report.read_text()
    for words in ("Layouts, best first", "What binds is", "Attainment over the session rate", "20 % more load"):
        assert words in page
    assert "DynamoGraphDeployment" in manifest.read_text()


@pytest.mark.slow
def test_a_budget_that_is_over_gives_a_plan_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*MOST[:-1], "0.000001", "--rate", "3", "--degrees", "1", "--jobs", "1"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "attained at 3 sessions/s" in out
    assert "The search ended early, because the time was over" in out


@pytest.mark.slow
def test_the_fewest_gpus_are_planned_by_trials(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [each for each in MOST if each != "--use-all"] + ["--by-trials", "--rate", "3", "--degrees", "1"]
    assert main([*argv, "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    best = plan["layouts"][0]
    assert plan["meets_slo"]
    assert not plan["uses_all"]
    assert plan["scale"] == 1
    assert best["gpus"] == 1
    assert best["headroom"] >= 1
    assert any("has the fewest GPUs that were found to carry 3 sessions/s" in line for line in plan["explanation"])
    assert main([*argv, "--rate", "100000"]) == 2
    assert "cannot hold the KV of the sessions" in capsys.readouterr().err
