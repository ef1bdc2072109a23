"""`ampd plan`: the result's keys, the explanation, and refusals in one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.main import main
from ampd.errors import UserError
from planner.plan_command import parse_degrees

pytestmark = pytest.mark.usefixtures("short_trials")
MUCH, FIRST = ["--budget-s", "1000000"], ["--budget-s", "0"]
"""The whole search, and only the programme's layout."""
MOST = ["plan", "tau-bench-airline", "--model", "llama-3.1-8b", "--gpu", "h100", "--gpus", "2", "--use-all"]
MOST += ["--ttft", "0.2", "--itl", "0.02", *MUCH]
TAU = ["plan", "tau-bench-airline", "--model", "llama-3.1-8b", "--gpu", "h100", *MUCH]


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([*TAU, "--json", *flags]) == 0
    whole: dict[str, Any] = json.loads(capsys.readouterr().out)
    return whole


@pytest.mark.long
def test_a_plan_has_the_fewest_gpus_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpus", "4", "--rate", "12", "--ttft", "0.2", "--itl", "0.02", "--degrees", "1,2"]
    plan = planned(capsys, *flags)
    assert 1 <= len(plan["layouts"]) <= 3
    for layout in plan["layouts"]:
        groups = [*layout["prefill"], *layout["decode"], *layout.get("mixed", [])]
        assert layout["gpus"] == sum(group["tp"] * group["replicas"] for group in groups) <= 4
        assert layout["simulated"]["rounds"] > 0
        assert layout["objective"] > 0
    assert plan["meets_slo"]
    best = plan["layouts"][0]
    assert best["gpus"] == min(layout["gpus"] for layout in plan["layouts"] if layout["meets_slo"])
    assert best["attainment"]["mean"] >= plan["attainment_level"]
    assert best["headroom"] >= 1
    assert plan["seconds"] > 0
    assert any("has the fewest GPUs that were found to carry 12 sessions/s" in line for line in plan["explanation"])
    assert any("What binds is" in line for line in plan["explanation"])
    assert not plan["uses_all"]


@pytest.mark.long
def test_the_most_goodput_is_planned_without_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, manifest = tmp_path / "plan.html", tmp_path / "plan.yaml"
    # With few GPUs, because on more of them so short trials carry any rate.
    argv = ["1" if flag == "2" else flag for flag in MOST]
    argv += ["--gpu-price", "2.5", "--report", str(report), "--output-manifest", str(manifest)]
    assert main([*argv, "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    best = plan["layouts"][0]
    assert best["gpus"] == 1
    assert best["goodput"]["low"] <= best["goodput"]["mean"] <= best["goodput"]["high"]
    assert 0 < plan["rate"] <= best["goodput"]["mean"]
    assert 0 < best["attainment"]["mean"] <= 1
    assert best["headroom"] == pytest.approx(best["goodput"]["mean"] / plan["rate"])
    assert {"prefill", "decode", "objective", "meets_slo", "slack", "simulated", "curve"} <= best.keys()
    assert plan["more_load"]["rate"] == pytest.approx(1.2 * plan["rate"])
    assert plan["more_load"]["carries"] == (best["goodput"]["mean"] >= 1.2 * plan["rate"])
    assert any(not point["carries"] for point in best["curve"])
    assert [point["rate"] for point in best["curve"]] == sorted(point["rate"] for point in best["curve"])
    assert plan["stopped"] is None
    assert any(line.startswith("What binds is") for line in plan["explanation"])
    page = report.read_text()
    for words in ("Layouts, best first", "What binds is", "Rounds attained over the session rate", "20 % more load is"):
        assert words in page
    assert best["price_per_hour"] == 2.5
    assert best["gpu_hours_per_1000_sessions"] == pytest.approx(1 / plan["rate"] / 3.6)
    assert plan["command"].split()[:3] == ["ampd", "plan", "tau-bench-airline"]
    for words in ("GPU hours per 1000 sessions", "price per hour", "How to reproduce", "--gpu-price 2.5"):
        assert words in page
    assert "DynamoGraphDeployment" in manifest.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("budget_s", ["0", "0.000001"])
def test_a_budget_that_is_over_gives_the_programmes_layout_and_says_so(
    budget_s: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*MOST[:-1], budget_s, "--rate", "3", "--degrees", "1", "--jobs", "1", "--gpu-price", "2"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^best after [0-9.]+ s: co-located 2xTP1, proposed by the integer programme$", err, re.M)
    assert "attained at 3 sessions/s" in out
    assert "per hour" in out
    assert "The search ended early, because the time was over" in out


@pytest.mark.slow
def test_a_plan_that_misses_its_rate_ends_with_1_if_wished_and_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "plan.yaml"
    argv = [*TAU, *FIRST, "--gpus", "1", "--rate", "90", "--itl", "0.02", "--degrees", "1", "--jobs", "1", "--json"]
    for flags, code in (([], 0), (["--fail-under", "0.001"], 0), (["--fail-under", "0.9"], 1)):
        assert main([*argv, *flags]) == code
        out, err = capsys.readouterr()
        assert not json.loads(out)["meets_slo"]
        assert ("of the rounds met both targets, --fail-under 0.9" in err) == bool(code)
    argv += ["--output-manifest", str(manifest)]
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["manifest"] is None
    assert re.search(r"plan.yaml is not written: it attains .* at the planned rate .*--force", err)
    assert not manifest.exists()
    assert main([*argv, "--force"]) == 0
    assert manifest.exists()


@pytest.mark.long
def test_a_rate_that_no_layout_carries_gives_the_best_and_the_miss(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--gpus", "1", "--rate", "100", "--ttft", "0.2", "--itl", "0.02", "--degrees", "1")
    assert not plan["meets_slo"]
    assert 0 < plan["layouts"][0]["goodput"]["mean"] < 100
    assert any("No layout of 1 GPU was found to carry 100 sessions/s" in line for line in plan["explanation"])


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_a_plan_without_an_answer_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    report, manifest = tmp_path / "plan.html", tmp_path / "plan.yaml"
    argv = [*TAU, "--gpus", "1", "--rate", "3", "--ttft", "0.0001", "--itl", "0.00001", "--degrees", "1", "--jobs", "1"]
    assert main([*argv, "--report", str(report), *(["--json"] if as_json else [])]) == 0
    out = capsys.readouterr().out
    sentence = "No layout of 1 GPU carries any rate that was tried with 90% of the rounds within both targets"
    assert sentence in report.read_text()
    if as_json:
        plan = json.loads(out)
        assert plan["layouts"] == []
        assert not plan["meets_slo"]
        (out,) = plan["explanation"]
    assert out.startswith(sentence)
    assert len(out.splitlines()) == 1
    assert main([*argv, "--output-manifest", str(manifest)]) == 1
    assert "plan.yaml is not written: the plan has no layout" in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_rate_it_plans_for_that_of_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TAU, *FIRST, "--json", "--gpus", "2", "--degrees", "1"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["rate"] == pytest.approx(15 / 145.7, rel=0.01)
    assert "the trace's own rate" in err


@pytest.mark.slow
def test_sessions_that_do_not_fit_into_memory_together_are_planned_too(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--gpus", "2", "--rate", "100000", "--degrees", "1", *FIRST)
    assert plan["layouts"][0]["slack"]["kv_memory"] < 1
    lost = plan["layouts"][0]["simulated"]["lost_sessions"]
    assert any("waiting sessions was dropped" in line for line in plan["explanation"]) == (lost > 0)


@pytest.mark.long
def test_a_degree_that_does_not_fit_is_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "tau-bench-airline", "--model", "llama-3.1-70b", "--gpu", "h100", "--gpus", "4", "--rate", "1"]
    assert main([*argv, *FIRST, "--degrees", "1,2"]) == 0
    out = capsys.readouterr().out
    assert "TP1 left out" in out
    assert re.search(r"(prefill|co-located) \d+xTP2", out)


@pytest.mark.long
def test_with_a_store_running_rounds_need_kv_memory_and_resident_sessions_host_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--gpus", "1", "--rate", "3", *FIRST]
    without, plan = planned(capsys, *flags, "--kv-store-gib-per-gpu", "0"), planned(capsys, *flags)
    assert plan["pools"] == "predictive"
    assert {"refusals", "moves", "kv_store"} <= set(plan["layouts"][0]["simulated"]), "as in `ampd serve`"
    assert not {"running_kv_tokens", "kv_store_tokens"} & set(without)
    assert "host_memory" not in without["layouts"][0]["slack"]
    assert plan["kv_store_tokens"] == {"1": 64 * 2**30 // 131_072}
    assert 0 < plan["running_kv_tokens"] <= plan["resident_kv_tokens"] == without["resident_kv_tokens"]
    slack = plan["layouts"][0]["slack"]
    assert slack["kv_memory"] >= without["layouts"][0]["slack"]["kv_memory"]
    assert slack["host_memory"] == pytest.approx(plan["kv_store_tokens"]["1"] / plan["resident_kv_tokens"])
    assert any("times the KV memory and" in line and "times the host memory" in line for line in plan["explanation"])
    tiny = planned(capsys, *flags, "--kv-store-gib-per-gpu", "0.05")
    assert tiny["layouts"][0]["slack"]["host_memory"] < 1
    lost = tiny["layouts"][0]["simulated"]["lost_sessions"]
    assert any("waiting sessions was dropped" in line for line in tiny["explanation"]) == (lost > 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpus", "1", "--degrees", "2"], r"--gpus: 1 is too few: a replica of .* needs 2"),
        (["--gpus", "3", "--degrees", "4,8"], r"--gpus: 3 is too few: a replica of .* needs 4"),
        (["--gpus", "8", "--degrees", "3"], r"--degrees: .* known at TP 1, 2, 4, 8, not at 3"),
        (["--gpus", "8", "--degrees", "two"], r"--degrees: give positive numbers"),
        (["--gpus", "0"], r"--gpus"),
        ([], r"--gpus is missing"),
        (["--gpus", "4", "--routing", "best"], r"unknown routing policy"),
        (["--gpus", "4", "--gpu", "h9000"], r"unknown GPU 'h9000'; known:"),
        (["--gpus", "4", "--kv-capacity-tokens", "500"], r"longest session has \d+ tokens, .* holds at most 500"),
        (["--gpus", "4", "--rate", "0"], r"--rate"),
    ],
)
def test_wrong_calls_are_refused_in_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TAU, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if "own rate" not in line]
    assert len(lines) == 1
    assert re.search(words, err), err


def test_sessions_that_all_arrive_at_once_have_no_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rounds = [{"incr_tokens": 10, "output_tokens": 5}]
    trace.write_text("\n".join(json.dumps({"session_id": n, "arrival_s": 0, "rounds": rounds}) for n in "ab"))
    assert main(["plan", str(trace), "--model", "llama-3.1-8b", "--gpu", "h100", "--gpus", "2"]) == 2
    assert "--rate is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_a_degree_too_small_for_the_longest_session_is_named_with_that_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "long.jsonl"
    rounds = [{"incr_tokens": 38000, "output_tokens": 5}]
    trace.write_text("\n".join(json.dumps({"session_id": f"s{n}", "arrival_s": n, "rounds": rounds}) for n in range(2)))
    argv = ["plan", str(trace), "--model", "qwen3-32b", "--gpu", "h100", "--rate", "0.1", "--ttft", "20"]
    argv += ["--degrees", "1,2", *FIRST]
    assert main([*argv, "--gpus", "1"]) == 2
    err = capsys.readouterr().err
    assert re.search(r"its longest session has 38005 tokens, the KV memory of a replica holds at most", err), err
    assert main([*argv, "--gpus", "2"]) == 0
    assert "TP1 left out: the KV memory of a replica does not hold the longest session" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["1," + "9" * 400, "9" * 5000, "0", "two"])
def test_degrees_beyond_all_use_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--degrees: give positive numbers"):
        parse_degrees(text)


LONG = ["plan", "coding-agents", "--model", "qwen3-32b", "--gpu", "h200", "--gpus", "2", "--rate", "0.01", *FIRST]


def test_a_trace_whose_sessions_are_too_long_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(LONG) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert "no layout reaches 90% of the rounds, because 6 of the trace's 16 sessions do not fit" in line
    assert "the longest has 59317 tokens, the longest context of the model is 40960; that leaves 71.3% of the" in line


def test_a_few_sessions_that_do_not_fit_are_one_line_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LONG, "--attainment", "0.5"]) == 0
    out, err = capsys.readouterr()
    assert "ampd plan: 6 of the trace's 16 sessions do not fit: the longest has 59317 tokens" in err.splitlines()[0]
    assert "co-located" in out or "prefill" in out
    assert main([*LONG, "--context", "131072"]) == 0
    assert "do not fit" not in capsys.readouterr().err


def test_a_layout_that_attains_no_round_is_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*TAU[:6], "--gpus", "2", "--rate", "3", "--ttft", "0.2", "--itl", "0.001", "--degrees", "1", *FIRST]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("No layout of 2 GPUs carries any rate that was tried")
    assert len(lines) == 2
    assert lines[1].startswith("The search ended early")
