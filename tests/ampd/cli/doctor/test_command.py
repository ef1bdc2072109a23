"""`ampd doctor` as a command, without engines and with two."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.main import main
from tests.ampd.perf.config_lab import write_config
from tests.harness.tcp_redis import TcpRedis

MODELLED = ("doctor", "--engine", "modelled")


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main([*arguments, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


def _with_engines(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """As `_json`, for a trial of two engines, which needs inotify instances that other graphs may hold."""
    code, document = _json(capsys, *arguments)
    if _verdicts(document)["inotify"] == "wrong":
        pytest.skip("this user has too few inotify instances left for a graph")
    return code, document


def _verdicts(document: dict[str, Any]) -> dict[str, str]:
    return {finding["check"]: finding["verdict"] for finding in document["findings"]}


def test_a_machine_without_engines_is_reported(
    capsys: pytest.CaptureFixture[str], redis_server: TcpRedis, tmp_path: Path
) -> None:
    out = tmp_path / "report.md"
    arguments = (*MODELLED, "--no-engines", "--state-url", redis_server.tcp_url, "--out", str(out))
    code, document = _json(capsys, *arguments)
    verdicts = _verdicts(document)
    assert code == (1 if "wrong" in verdicts.values() else 0)
    assert (verdicts["Python"], verdicts["packages"], verdicts["model"]) == ("ok",) * 3
    assert verdicts["Redis"] in ("ok", "slow"), "slow on a busy machine"
    assert (verdicts["NIXL"], verdicts["two engines"]) == ("skipped", "skipped")
    assert all(finding["fix"] for finding in document["findings"] if finding["verdict"] in ("slow", "wrong"))
    text = out.read_text()
    assert text.startswith("# Report of `ampd doctor`")
    assert redis_server.tcp_url in text


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    main([*MODELLED, "--no-engines"])
    captured = capsys.readouterr()
    assert "ok       Python" in captured.out
    assert "ampd doctor: Redis" in captured.err


def test_the_file_for_a_bug_report_may_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main([*MODELLED, "--no-engines", "--out", "-"])
    printed = capsys.readouterr().out
    assert printed.startswith("# Report of `ampd doctor`")
    assert "ok       Python" in printed
    assert json.loads(printed.partition("```json\n")[2].partition("\n```")[0])["readings"]["Python"]
    assert main([*MODELLED, "--no-engines", "--out", "-", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_a_redis_that_is_away_is_wrong_and_nothing_else_stops(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = _json(capsys, *MODELLED, "--no-engines", "--state-url", "redis://me:hunter2@127.0.0.1:1/0")
    assert code == 1
    assert _verdicts(document)["Redis"] == "wrong"
    assert _verdicts(document)["model"] == "ok"
    assert "hunter2" not in json.dumps(document)


def test_engines_are_not_started_for_a_model_that_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, document = _json(capsys, *MODELLED, "--model", str(tmp_path))
    assert code == 1
    (trial,) = (finding for finding in document["findings"] if finding["check"] == "two engines")
    assert trial["verdict"] == "skipped"
    # Other graphs may hold the inotify instances of this machine.
    assert re.fullmatch(r"they cannot run before this is fixed: (\w+, )*model", trial["found"])


def test_engines_are_not_started_without_times_for_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_config(tmp_path / "mine", {})
    (folder / "tokenizer.json").touch()
    code, document = _with_engines(capsys, *MODELLED, "--model", str(folder))
    assert code == 1
    assert (_verdicts(document)["performance model"], _verdicts(document)["two engines"]) == ("wrong", "skipped")
    (finding,) = (finding for finding in document["findings"] if finding["check"] == "performance model")
    assert "no GPU" in finding["found"]
    assert f"--perf {folder}@h200" in finding["fix"]


@pytest.mark.parametrize(
    "arguments", [("--engine", "another"), ("--tp", "0"), ("--out", "/nowhere/report.md"), ("--perf", "none")]
)
def test_wrong_calls_end_with_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, str]) -> None:
    assert main([*MODELLED, "--no-engines", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1


@pytest.mark.slow
def test_two_modelled_engines_exchange_kv(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    code, document = _with_engines(capsys, *MODELLED, "--out", str(out))
    verdicts = _verdicts(document)
    assert verdicts.get("equal tokens") == "ok", document["findings"]
    assert code == (1 if "wrong" in verdicts.values() else 0)
    assert {"KV reads", "times"} <= verdicts.keys()
    assert {f"## The end of {name}.log" for name in ("serve", "prefill-0", "decode-1")} <= set(
        out.read_text().split("\n")
    )


@pytest.mark.slow
def test_engines_that_do_not_start_are_a_finding_with_their_logs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "report.md"
    code, document = _with_engines(capsys, *MODELLED, "--worker-args=--no-such-flag", "--out", str(out))
    (trial,) = (finding for finding in document["findings"] if finding["check"] == "two engines")
    assert (code, trial["verdict"]) == (1, "wrong")
    assert "no-such-flag" in trial["found"]
    # The first worker that ends ends the other one, perhaps before that has logged anything.
    assert "no-such-flag" in out.read_text().partition("## The end of ")[2]


@pytest.mark.long
def test_two_real_engines_exchange_kv(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sglang", exc_type=ImportError)
    pytest.importorskip("nixl")
    code, document = _with_engines(capsys, "doctor")
    verdicts = _verdicts(document)
    assert verdicts.get("equal tokens") == "ok", document["findings"]
    assert verdicts["NIXL on this machine"] in ("ok", "slow")
    assert code == (1 if "wrong" in verdicts.values() else 0)
    (reads,) = (finding for finding in document["findings"] if finding["check"] == "KV reads")
    assert "GB/s" in reads["found"]
