"""`ampd plan`: the result's keys, the explanation, the cache, and refusals in one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.main import main
from planner.layout import search

TAU = ["plan", "tau-bench-airline", "--model", "llama-3.1-8b", "--gpu", "h100"]


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([*TAU, "--json", *flags]) == 0
    whole: dict[str, Any] = json.loads(capsys.readouterr().out)
    return whole


@pytest.mark.slow
def test_a_plan_has_checked_layouts_and_says_why(curves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpus", "4", "--rate", "6", "--ttft", "0.2", "--itl", "0.02", "--cache", str(curves)]
    plan = planned(capsys, *flags)
    assert len(plan["layouts"]) == 3
    for layout in plan["layouts"]:
        groups = [*layout["prefill"], *layout["decode"]]
        assert layout["gpus"] == sum(group["tp"] * group["replicas"] for group in groups) <= 4
        assert layout["prefill"]
        assert layout["decode"]
        assert layout["simulated"]["rounds"] > 0
        assert layout["objective"] > 0
    attained = [round(layout["simulated"]["attainment"]["rounds"], 3) for layout in plan["layouts"]]
    assert attained == sorted(attained, reverse=True)
    assert plan["meets_slo"]
    assert plan["seconds"] > 0
    assert any("What binds is" in line for line in plan["explanation"])
    assert plan["next_step"]["more_gpus"] == 1


@pytest.mark.long
def test_a_second_plan_simulates_no_replica_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--gpus", "2", "--rate", "3", "--cache", str(tmp_path), "--jobs", "1"]
    first = planned(capsys, *flags)
    assert len(list(tmp_path.glob("*.json"))) == 2

    def simulated_again(question: object) -> None:
        raise AssertionError(question)

    monkeypatch.setattr(search, "load_curve", simulated_again)
    second = planned(capsys, *flags)
    assert {**second, "seconds": 0} == {**first, "seconds": 0}
    for file in tmp_path.glob("*.json"):
        file.write_text("damaged")
    with pytest.raises(AssertionError):
        main([*TAU, *flags])
    with pytest.raises(AssertionError):
        main([*TAU, *flags, "--itl", "0.01"])


@pytest.mark.long
def test_targets_that_no_layout_meets_give_the_best_and_the_miss(
    curves: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(capsys, "--gpus", "2", "--rate", "3", "--ttft", "0.02", "--itl", "0.004", "--cache", str(curves))
    assert not plan["meets_slo"]
    assert plan["layouts"]
    assert any("No layout meets the targets" in line and "misses by" in line for line in plan["explanation"])
    much = planned(capsys, "--gpus", "2", "--rate", "25", "--top", "1", "--cache", str(curves))
    assert not much["meets_slo"]
    assert much["layouts"][0]["headroom"] < 1
    assert any("No layout carries the rate" in line for line in much["explanation"])


@pytest.mark.slow
def test_without_a_rate_it_plans_for_that_of_the_trace(curves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TAU, "--json", "--gpus", "2", "--cache", str(curves)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["rate"] == pytest.approx(15 / 145.7, rel=0.01)
    assert "the trace's own rate" in err


@pytest.mark.long
def test_a_degree_that_does_not_fit_is_left_out_and_named(curves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "tau-bench-airline", "--model", "llama-3.1-70b", "--gpu", "h100", "--gpus", "4", "--rate", "1"]
    assert main([*argv, "--degrees", "1,2", "--cache", str(curves), "--top", "1"]) == 0
    out = capsys.readouterr().out
    assert "TP1 left out" in out
    assert re.search(r"prefill \d+xTP[24]", out)


@pytest.mark.long
def test_with_a_store_running_rounds_need_kv_memory_and_resident_sessions_host_memory(
    curves: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--gpus", "2", "--rate", "3", "--top", "1", "--cache", str(curves)]
    without, plan = planned(capsys, *flags), planned(capsys, *flags, "--kv-store-gib-per-gpu", "64")
    assert not {"running_kv_tokens", "kv_store_tokens"} & set(without)
    assert "host_memory" not in without["layouts"][0]["slack"]
    assert plan["kv_store_tokens"] == {"1": 64 * 2**30 // 131_072}
    assert 0 < plan["running_kv_tokens"] <= plan["resident_kv_tokens"] == without["resident_kv_tokens"]
    slack = plan["layouts"][0]["slack"]
    assert slack["kv_memory"] >= without["layouts"][0]["slack"]["kv_memory"]
    assert slack["host_memory"] == pytest.approx(plan["kv_store_tokens"]["1"] / plan["resident_kv_tokens"])
    assert any("times the KV memory and" in line and "times the host memory" in line for line in plan["explanation"])
    assert main([*TAU, *flags, "--kv-store-gib-per-gpu", "0.05"]) == 2
    assert "tokens are resident, the KV store of a GPU holds at most 409" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpus", "1"], r"--gpus: 1 is too few: .* need 2 \(TP 1 each\)"),
        (["--gpus", "6", "--degrees", "4,8"], r"--gpus: 6 is too few: .* need 8 \(TP 4 each\)"),
        (["--gpus", "8", "--degrees", "3"], r"--degrees: .* known at TP 1, 2, 4, 8, not at 3"),
        (["--gpus", "8", "--degrees", "two"], r"--degrees: give positive numbers"),
        (["--gpus", "0"], r"--gpus"),
        ([], r"--gpus is missing"),
        (["--gpus", "4", "--routing", "best"], r"unknown routing policy"),
        (["--gpus", "4", "--gpu", "h9000"], r"unknown GPU 'h9000'; known:"),
        (["--gpus", "4", "--kv-capacity-tokens", "500"], r"longest session has \d+ tokens, .* holds at most 500"),
        pytest.param(
            ["--gpus", "2", "--rate", "100000"], r"cannot hold the KV of the sessions", marks=pytest.mark.slow
        ),
        (["--gpus", "4", "--rate", "0"], r"--rate"),
    ],
)
def test_wrong_calls_are_refused_in_one_line(
    flags: list[str], words: str, curves: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TAU, "--cache", str(curves), *flags]) == 2
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
    argv += ["--degrees", "1,2", "--no-use-cache", "--top", "1"]
    assert main([*argv, "--gpus", "3"]) == 2
    err = capsys.readouterr().err
    assert re.search(r"--gpus: 3 is too few: the longest session of .* \(38005 tokens\) .* from TP 2 on", err), err
    assert main([*argv, "--gpus", "4"]) == 0
    assert "TP1 left out: the KV memory of a replica does not hold the longest session" in capsys.readouterr().out
