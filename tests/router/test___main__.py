"""Wrong calls of `python -m router`: one line that says where and how to mend it, exit code 2, nothing started."""

import subprocess
import sys
from pathlib import Path

import pytest

from ampd.tiny_model import tiny_model_path
from router.__main__ import main

MODEL = str(tiny_model_path())


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a refused call."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", MODEL, "--routing", "psychic"], ["psychic", "always-local", "always-remote"]),
        (["--model", MODEL, "--binding", "psychic"], ["psychic", "least-kv"]),
        (["--model", MODEL, "--routing", "ampd(gamma=1)"], ["gamma", "alpha"]),
        (["--model", MODEL, "--routing", "ampd(alpha=-1)"], ["alpha", "-1"]),
        (["--model", MODEL, "--binding", "kv-router(tokens=1)"], ["tokens", "overlap_weight"]),
        (["--model", MODEL, "--routing", "ampd(alpha)"], ["alpha", "name=value"]),
        (["--model", MODEL, "--perf", "no-such"], ["no-such", "tiny-cpu"]),
        (["--model", MODEL], ["--perf is missing", "qwen3-32b@h20"]),
        (["--model", MODEL, "--dyn-tool-call-parser", "no-such"], ["no-such", "hermes"]),
        (["--model", MODEL, "--dyn-reasoning-parser", "no-such"], ["no-such"]),
        (["--model", MODEL, "--custom-jinja-template", "/no/such"], ["/no/such"]),
        (["--model", MODEL, "--context-length", "one"], ["--context-length", "one"]),
        (["--model", "/no/such/folder"], ["/no/such/folder"]),
        (["--nonsense"], ["--nonsense"]),
        ([], ["--model"]),
    ],
)
def test_a_wrong_call_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    line = refusal(capsys, *arguments)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(("files", "word"), [([], "config.json"), (["config.json"], "tokenizer")])
def test_a_folder_that_is_no_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, files: list[str], word: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    assert word in refusal(capsys, "--model", str(tmp_path))


def test_a_coordinator_that_anybody_may_call_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AMPD_GRAPH_SECRET_FILE", raising=False)
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "10.0.0.7")
    line = refusal(capsys, "--model", MODEL, "--perf", "tiny-cpu")
    assert "--graph-secret-file is missing" in line
    assert "DYN_TCP_RPC_HOST=10.0.0.7 is not" in line


@pytest.mark.slow
def test_a_redis_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "router", "--model", MODEL, "--perf", "tiny-cpu"),
            *("--state-url", "redis://127.0.0.1:1/0"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(tmp_path),
            "DYN_LOG": "error",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "HOME": str(Path.home()),
        },
    )
    assert result.returncode == 2, result.stderr
    assert "redis://127.0.0.1:1" in result.stderr
    assert "Traceback" not in result.stderr
