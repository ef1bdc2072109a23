"""`ampd simulate`: combinations, determinism, the result's keys, and refusals in one line."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.main import main
from ampd.cli.serve.settings import ServeSettings
from ampd.errors import UserError
from ampd.policies.base import parse_named, split_names
from planner.case_settings import Mode
from planner.simulate_command import SimulateSettings, parse_rates

BASE = ["simulate", "tau-bench-airline", "--model", "llama-3.1-8b", "--gpu", "h100", "--ttft", "0.2", "--itl", "0.02"]


def simulated(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([*BASE, "--json", *flags]) == 0
    whole: dict[str, Any] = json.loads(capsys.readouterr().out)
    return whole


def test_one_combination_has_the_shared_keys_itself(capsys: pytest.CaptureFixture[str]) -> None:
    whole = simulated(capsys)
    assert {"attainment", "ttft_s", "ttft_initial_s", "ttft_incremental_s", "itl_s", "e2e_s", "routes"} <= set(whole)
    assert whole["rounds"] == 105
    assert whole["sessions"] == 16
    assert whole["errors"] == 0
    assert set(whole["attainment"]) == {"rounds", "sessions"}
    assert set(whole["ttft_s"]) == {"mean", "p50", "p95", "p99"}
    assert sum(whole["routes"].values()) == 105
    assert [each["routing"] for each in whole["results"]] == ["predictive"]
    assert whole["performance_model"]["kind"] == "analytic"


@pytest.mark.slow
def test_combinations_are_named_and_do_not_depend_on_the_processes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--routing", "ampd(alpha=0.5, beta=0.9),always-remote", "--ordering", "ampd,fcfs", "--rate", "1,4"]
    flags += ["--mode", "disaggregated,always-remote,colocated", "--limit", "20"]
    each, two = (simulated(capsys, *flags, "--jobs", jobs) for jobs in ("1", "2"))
    assert each == two
    names = [(row["mode"], row["routing"], row["ordering"], row["rate"]) for row in each["results"]]
    assert len(names) == len(set(names)) == (4 + 1 + 2) * 2
    assert ("disaggregated", "ampd(alpha=0.5, beta=0.9)", "fcfs", 4.0) in names
    assert ("colocated", "always-local", "fcfs", 1.0) in names
    by_mode = {row["mode"]: row for row in each["results"]}
    assert by_mode["colocated"]["cluster"] == "co-located 2xTP1"
    assert by_mode["always-remote"]["routes"]["local"] == 0
    assert by_mode["colocated"]["routes"]["remote"] == 0


@pytest.mark.parametrize("routing", ["ampd", "ampd(alpha=0.5)", "predictive"])
def test_the_table_tells_the_papers_policy_from_this_system(routing: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--routing", routing, "--limit", "2"]) == 0
    assert ("Algorithm 1 of the AMPD paper" in capsys.readouterr().out) is routing.startswith("ampd")


def test_pools_and_slicing_are_named_where_they_are_not_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--pools", "predictive,static,arrow(cooldown_s=2.0)", "--mode", "disaggregated,colocated", "--rate", "20"]
    rows = simulated(capsys, *flags, "--decode", "2xTP1")["results"]
    assert [(row["mode"], row.get("pools"), row.get("slicing")) for row in rows] == [
        ("disaggregated", None, None),
        ("disaggregated", "static", None),
        ("disaggregated", "arrow(cooldown_s=2.0)", None),
        ("colocated", None, None),
    ]
    assert rows[1]["role_flips"] == 0


@pytest.mark.slow
def test_colocated_workers_run_the_ordering_and_the_slicing_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--mode", "colocated", "--rate", "40", "--limit", "100", "--prefill", "0"]
    plain, ours = (simulated(capsys, *flags, *named) for named in ([], ["--ordering", "on-time", "--slicing", "slack"]))
    assert (plain["ordering"], plain.get("slicing")) == ("fcfs", None)
    assert (ours["routing"], ours["ordering"], ours["slicing"]) == ("always-local", "on-time", "slack")
    assert ours["itl_s"]["p99"] < plain["itl_s"]["p99"]


@pytest.mark.slow
def test_mixed_replicas_carry_what_colocated_ones_carry(capsys: pytest.CaptureFixture[str]) -> None:
    """A prefill that leaves pauses two batches instead of one. When rounds left for the earliest end, half of the
    sessions missed a target."""
    load = ["--model", "qwen3-32b", "--gpu", "h200", "--ttft", "0.6", "--itl", "0.03", "--rate", "4", "--limit", "60"]
    colocated = simulated(capsys, *load, "--prefill", "0", "--decode", "4xTP1")
    assert colocated["attainment"]["sessions"] > 0.9
    for roles in (["--mixed", "4xTP1"], ["--mixed", "2xTP1", "--prefill", "0", "--decode", "2xTP1"]):
        mixed = simulated(capsys, *load, *roles)
        assert mixed["attainment"]["rounds"] >= colocated["attainment"]["rounds"] - 0.01
        assert mixed["attainment"]["sessions"] >= colocated["attainment"]["sessions"] - 0.05


def test_mixed_replicas_stand_alone_or_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "20", "--limit", "60"]
    together = simulated(capsys, *flags, "--mixed", "1xTP2,2xTP1", "--mode", "colocated")
    assert (together["cluster"], together["routes"]["remote"]) == ("co-located 2xTP1+1xTP2", 0)
    flags += ["--routing", "always-remote"]
    alone = simulated(capsys, *flags, "--mixed", "1xTP2,2xTP1")
    assert (alone["cluster"], alone["gpus"], alone["errors"]) == ("mixed 1xTP2+2xTP1", 4, 0)
    assert alone["routes"]["local"] == 0
    beside = simulated(capsys, *flags, "--mixed", "1xTP2", "--prefill", "1xTP1", "--decode", "1xTP4")
    assert (beside["cluster"], beside["gpus"]) == ("prefill 1xTP1, decode 1xTP4, mixed 1xTP2", 7)


def test_decode_workers_alone_are_colocated_with_the_named_policies(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prefill", "0", "--decode", "2xTP1", "--rate", "20", "--limit", "60"]
    whole = simulated(capsys, *flags)
    assert (whole["cluster"], whole["ordering"], whole["routes"]["remote"]) == ("co-located 2xTP1", "on-time", 0)
    named = simulated(capsys, *flags, "--mode", "colocated", "--ordering", "on-time", "--slicing", "slack")
    assert {key: named[key] for key in ("ttft_s", "itl_s", "attainment")} == {
        key: whole[key] for key in ("ttft_s", "itl_s", "attainment")
    }


def test_a_pools_policy_may_make_prefill_workers_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prefill", "0", "--decode", "3xTP1", "--routing", "always-remote", "--pools", "arrow"]
    whole = simulated(capsys, *flags, "--rate", "60", "--limit", "100")
    assert whole["pools"] == "arrow"
    assert whole["role_flips"] > 0
    assert whole["routes"]["remote"] > 0


def test_roles_that_change_need_the_moves_between_all_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = json.loads((files("ampd.perf") / "profiles" / "qwen3-32b-h20.json").read_text())
    profile["kv_transfers"] = [move for move in profile["kv_transfers"] if move["tp_source"] != move["tp_target"]]
    file = tmp_path / "perf.json"
    file.write_text(json.dumps(profile))
    flags = ["simulate", "tau-bench-airline", "--perf", str(file), "--prefill", "1xTP2", "--decode", "2xTP4"]
    assert main([*flags, "--pools", "static"]) == 0
    assert main([*flags, "--pools", "static,arrow"]) == 2
    assert "no KV transfer" in capsys.readouterr().err


def test_the_table_and_the_label_name_the_pools(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--pools", "predictive,laps"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("predictive / on-time ")]
    assert [line.startswith("predictive / on-time / pools laps ") for line in lines] == [False, True]


def test_a_seed_moves_the_arrivals(capsys: pytest.CaptureFixture[str]) -> None:
    each, same, other = (simulated(capsys, "--rate", "5", "--seed", seed) for seed in ("1", "1", "2"))
    assert each["ttft_s"] == same["ttft_s"]
    assert each["ttft_s"] != other["ttft_s"]


@pytest.mark.slow
def test_more_load_attains_less(capsys: pytest.CaptureFixture[str]) -> None:
    rows = simulated(capsys, "--rate", "2,400", "--limit", "100")["results"]
    assert rows[0]["attainment"]["rounds"] > rows[1]["attainment"]["rounds"] + 0.1


def test_the_table_has_a_row_a_combination(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--routing", "ampd,always-local"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("ampd / on-time", "always-local / on-time")) for line in lines) == 2


def test_the_table_shows_how_a_degree_without_its_tp_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--prefill", "1x8", "--decode", "1xTP4", "--limit", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "prefill 1xTP8, decode 1xTP4: 12 GPUs, 3 sessions"


def test_a_store_in_host_memory_is_named_and_saves_what_kv_memory_cannot_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--rate", "6", "--limit", "40", "--kv-capacity-tokens", "12000"]
    without, stored = simulated(capsys, *flags, "--kv-store-gib-per-gpu", "0"), simulated(capsys, *flags)
    assert "kv_store" not in without
    assert without["lost_sessions"] > 0
    assert stored["lost_sessions"] == 0
    store = stored["kv_store"]
    assert set(store) == {"hit_tokens", "evicted_tokens", "device_evictions", "reload_s"}
    assert list(store["hit_tokens"]) == ["device", "store", "peer", "recomputed"]
    assert store["hit_tokens"]["store"] > 0
    assert store["reload_s"] > 0
    assert store["device_evictions"] > 0


def test_a_store_needs_the_size_of_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = json.loads((files("ampd.perf") / "profiles" / "qwen3-32b-h20.json").read_text())
    file = tmp_path / "unknown.json"
    file.write_text(json.dumps(profile | {"kv_bytes_per_token": None}))
    argv = ["simulate", "tau-bench-airline", "--perf", str(file)]
    assert main([*argv, "--kv-store-gib-per-gpu", "1"]) == 2
    assert "has no kv_bytes_per_token" in capsys.readouterr().err
    assert main([*argv, "--limit", "3"]) == 0, "the default size needs none"


def test_workers_without_roles_start_as_those_of_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "20", "--limit", "60"]
    even = simulated(capsys, *flags, "--prefill", "2xTP1", "--decode", "3xTP1")
    assert simulated(capsys, *flags, "--workers", "5xTP1")["results"] == even["results"]
    alone = simulated(capsys, *flags, "--workers", "1xTP1")
    assert alone["results"][0]["cluster"] == "co-located 1xTP1"


def test_a_simulation_is_of_what_ampd_serve_starts(capsys: pytest.CaptureFixture[str]) -> None:
    for field in ("binding", "routing", "ordering", "slicing", "pools", "max_wait"):
        assert SimulateSettings.model_fields[field].default == ServeSettings.model_fields[field].default
    assert {"refusals", "moves", "kv_store"} <= set(simulated(capsys, "--limit", "3"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "2xTP1", "--decode", "1xTP1"], r"--decode: --workers are replicas of any role; leave out one"),
        (["--workers", "0"], r"--workers: at least one replica is needed"),
        (["--kv-store-gib-per-gpu", "-1"], r"--kv-store-gib-per-gpu"),
        (["--kv-store-gib-per-gpu", "0.0001"], r"--kv-store-gib-per-gpu: 0.0001 GiB hold no page of 16 tokens"),
        (["--routing", "best"], r"unknown routing policy 'best'; known: .*ampd"),
        (["--ordering", "best"], r"unknown ordering policy"),
        (["--binding", "best"], r"unknown binding policy"),
        (["--pools", "best"], r"unknown pools policy 'best'; known: arrow, laps, predictive, static"),
        (["--pools", "arrow(cooldown_s=-1)"], r"cooldown_s: .*greater than or equal to 0"),
        (["--slicing", "best"], r"unknown slicing policy 'best'; known: .*whole"),
        (["--slicing", ","], r"name at least one"),
        (["--routing", "ampd(gamma=1)"], r"no parameter 'gamma'"),
        (["--routing", "ampd(alpha)"], r"give parameters as name=value"),
        (["--routing", "ampd(alpha=-1)"], r"alpha: .*greater than 0"),
        (["--routing", ","], r"name at least one"),
        (["--mode", "fast"], r"--mode: known are disaggregated, always-remote, colocated"),
        (["--prefill", "4TP2"], r"--prefill: give replicas .* \(given: '4TP2'\)"),
        (["--mixed", "2TP2"], r"--mixed: give replicas .* \(given: '2TP2'\)"),
        (["--mixed", "1xTP3"], r"no times for tp 3"),
        (["--prefill", "0", "--mode", "colocated,always-remote"], r"--prefill: mode always-remote needs"),
        (
            ["--mode", "colocated", "--routing", "predictive"],
            r"--routing: mode colocated would not use it; leave it out",
        ),
        (["--mode", "colocated", "--pools", "arrow"], r"--pools: mode colocated would not use it"),
        (
            ["--mode", "always-remote,colocated", "--pools", "arrow"],
            r"--pools: mode always-remote and colocated would",
        ),
        (["--decode", "0"], r"--decode: at least one decode replica .* or a mixed one"),
        (["--decode", "1xTP3"], r"no times for tp 3; it has tp 1, 2, 4, 8"),
        (["--rate", "0"], r"--rate: give positive numbers"),
        (["--rate", "fast"], r"--rate: give positive numbers"),
        (["--limit", "0"], r"--limit"),
        (["--gpu", "h9000"], r"unknown GPU 'h9000'; known: a100"),
        (["--model", "gpt-9"], r"unknown model 'gpt-9'; .* mixtral-8x7b"),
        (["--perf", "tiny-cpu"], r"leave out --model, --gpu and --kv-cache-dtype"),
        (["--no-such-flag"], r"unrecognized"),
    ],
)
def test_wrong_calls_are_refused_in_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert re.search(words, err), err


def test_wrong_traces_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for trace, words in ((str(empty), "holds no session"), ("nowhere", "no such trace")):
        assert main(["simulate", trace, "--perf", "tiny-cpu"]) == 2
        assert words in capsys.readouterr().err


def test_a_model_or_a_gpu_alone_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "tau-bench-airline", "--model", "qwen3-32b"]) == 2
    assert "--model and --gpu are missing" in capsys.readouterr().err


def test_a_cluster_that_serves_nothing_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--kv-capacity-tokens", "100"]) == 1
    assert re.search(r"no round could be served: .* KV memory of a decode worker holds 100", capsys.readouterr().err)


def test_rates_and_names_are_split_where_people_mean_it() -> None:
    assert parse_rates(None) == [None]
    assert parse_rates("0.5, 2") == [0.5, 2.0]
    assert split_names("ampd(alpha=0.8,beta=1), fcfs") == ["ampd(alpha=0.8,beta=1)", "fcfs"]
    assert parse_named(" ampd( alpha = 0.8 , name=x ) ") == ("ampd", {"alpha": 0.8, "name": "x"})
    assert set(Mode) == {"disaggregated", "always-remote", "colocated"}


@pytest.mark.parametrize("text", ["1e400", "1,1" + "0" * 400, "1e308", "5e-324", "nan", "-1"])
def test_rates_beyond_all_use_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--rate: give positive numbers"):
        parse_rates(text)


LONG = ["simulate", "coding-agents", "--model", "qwen3-32b", "--gpu", "h200", "--limit", "16"]


def test_sessions_that_do_not_fit_are_one_line_with_the_number_and_the_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(LONG) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "ampd simulate: 6 of the trace's 16 sessions do not fit: the longest has 59317 tokens, the longest context of "
        "the model is 40960"
    )
    assert main([*LONG, "--context", "131072", "--kv-capacity-tokens", "50000"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "the KV memory of a replica holds 50000 (" in line
    assert main([*LONG, "--context", "131072"]) == 0
    assert capsys.readouterr().err == ""


def test_the_format_of_the_kv_halves_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    bytes_moved = [simulated(capsys, *flags)["kv_bytes"] for flags in ([], ["--kv-cache-dtype", "fp8_e4m3"])]
    shares = [sum(filter(None, moved.values())) for moved in bytes_moved]
    assert 0.4 < shares[1] / shares[0] < 0.6


def test_a_profile_has_its_own_kv(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "tau-bench-airline", "--perf", "tiny-cpu", "--kv-cache-dtype", "bf16"]) == 2
    assert "leave out --model, --gpu and --kv-cache-dtype" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = ["simulate", "tau-bench-airline", "--model", "llama-3.1-8b", "--gpu", "h100"]
    assert main([*case, "--report", str(tmp_path / "none" / "x.html")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "cannot be written" in err
    assert len(err.splitlines()) == 1
