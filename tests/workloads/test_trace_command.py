"""`ampd trace`: convert, generate, stats, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ampd.cli.main import main
from workloads.trace import load_trace


def test_generate_then_stats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "g.jsonl"
    flags = ["--sessions", "7", "--rate", "2", "--seed", "3", "--output", str(path)]
    assert main(["trace", "generate", "hotpotqa", *flags]) == 0
    assert len(load_trace(str(path))) == 7
    capsys.readouterr()
    assert main(["trace", "stats", str(path), "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert (stats["sessions"], stats["rounds"], stats["rewrites"]) == (7, 21, 0)
    assert main(["trace", "stats", str(path)]) == 0
    assert "sessions 7, rounds 21" in capsys.readouterr().out


def test_stats_count_rewrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [{"incr_tokens": 5, "output_tokens": 2}, {"incr_tokens": 1, "output_tokens": 1, "keep_tokens": 6}]
    rounds.append({"incr_tokens": 1, "output_tokens": 1, "keep_tokens": 8})
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"session_id": "a", "arrival_s": 0, "rounds": rounds}))
    assert main(["trace", "stats", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rewrites"] == 1


def test_convert_writes_a_trace_and_names_duplicates_apart(tmp_path: Path) -> None:
    source, out = tmp_path / "runs.json", tmp_path / "o.jsonl"
    traj = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    source.write_text(json.dumps([{"task_id": 1, "trial": 0, "traj": traj}] * 2))
    assert main(["trace", "convert", "tau-bench", str(source), str(out)]) == 0
    assert [session.session_id for session in load_trace(str(out))] == ["1-0", "1-0~2"]


def test_convert_finds_the_format_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs.json").write_text(json.dumps([{"task_id": 1, "traj": [{"role": "user", "content": "hi"}]}]))
    assert main(["trace", "convert", "runs.json"]) == 2
    format_line, _, error = capsys.readouterr().err.strip().splitlines()
    assert format_line == "runs.json: format tau-bench, because its rows have traj/role"
    assert "holds no session of the format tau-bench" in error
    deltas = [
        {"session_id": f"s{index}", "input_length": tokens, "output_length": 5, "hash_ids": hashes, **times}
        for index in range(3)
        for tokens, hashes, times in (
            (22_528, [*range(40), 1000 + index], {"timestamp": 700.0 * index}),
            (1000, [2000 + index, 3000 + index], {"delay": 2000.0}),
        )
    ]
    Path("deltas.v2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in deltas))
    assert main(["trace", "convert", "deltas.v2.jsonl"]) == 0
    assert "format mooncake-delta, because rows of a session are shorter" in capsys.readouterr().err
    sessions = load_trace("deltas.trace.jsonl")
    assert [session.arrival_s for session in sessions] == [0.0, 0.7, 1.4]
    assert [session.shared_prefix and session.shared_prefix.tokens for session in sessions] == [20_480] * 3
    assert main(["trace", "convert", "mooncake", "deltas.v2.jsonl"]) == 0
    assert "convert it as mooncake-delta" in capsys.readouterr().err
    assert main(["trace", "convert", "deltas.trace.jsonl"]) == 2
    assert "this is a trace of AMPD already" in capsys.readouterr().err
    Path("other.jsonl").write_text('{"x": 1}\n')
    assert main(["trace", "convert", "other.jsonl", "o.jsonl"]) == 2
    assert "other.jsonl:1: no known format has such rows (keys: x)" in capsys.readouterr().err
    assert main(["trace", "convert", "a", "b", "c", "d"]) == 2
    assert "takes [FORMAT] IN [OUT]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["convert", "nope", ".", "o"], "known: agentic-mooncake"),
        (["convert", "trail", "missing.json", "o"], "no such file"),
        (["convert", "trail", ".", "o", "--tokenizer", "missing"], "--tokenizer missing"),
        (["generate", "nope", "--output", "o"], "known: toolbench"),
        (["generate", "gaia"], "--output is missing"),
        (["stats", "nope"], "shipped: "),
        (["nope"], "known: convert"),
        ([], "sub-command is missing"),
    ],
)
def test_errors_are_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *argv]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


def test_an_empty_conversion_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "runs.json", tmp_path / "o.jsonl"
    source.write_text("[]")
    assert main(["trace", "convert", "tau-bench", str(source), str(out)]) == 2
    assert not out.exists()
    assert "holds no session" in capsys.readouterr().err
