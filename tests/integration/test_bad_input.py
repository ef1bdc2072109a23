"""Wrong calls of the `ampd` command: one line that says where and how to mend it, exit code 2, nothing started."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ampd.tiny_model import tiny_model_path
from tests.harness.ports import free_ports
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def _ampd(*arguments: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ampd", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def _refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refused call, beside the warning of a secret on the command line."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    lines = [line for line in result.stderr.strip().splitlines() if "to every user of this machine" not in line]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


def test_unknown_command_lists_the_known_ones() -> None:
    assert "known: serve, replay, " in _refusal(_ampd("fly"))


@pytest.mark.parametrize(
    ("flag", "known"), [("--routing", "always-local"), ("--ordering", "fcfs"), ("--binding", "least-kv")]
)
def test_unknown_policy_lists_the_known_ones(flag: str, known: str) -> None:
    line = _refusal(_ampd("serve", "--engine", "modelled", flag, "psychic"))
    assert "psychic" in line
    assert known in line


def test_unknown_flag_is_named() -> None:
    assert "--prefil" in _refusal(_ampd("serve", "--prefil", "2"))


def test_value_out_of_range_is_named() -> None:
    assert "--decode" in _refusal(_ampd("serve", "--decode", "0"))


def test_unknown_perf_profile_lists_the_known_ones() -> None:
    assert "tiny-cpu" in _refusal(_ampd("serve", "--engine", "modelled", "--perf", "no-such"))


def test_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in _refusal(_ampd("serve", "--engine", "modelled", "--port", str(port)))


@pytest.mark.parametrize("host", ["1.2.3.4", "no.such.host.invalid"])
def test_a_host_that_is_not_this_machines_is_named(host: str) -> None:
    line = _refusal(_ampd("serve", "--engine", "modelled", "--host", host))
    assert "--host must be" in line
    assert "--port" not in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--worker-args", "--perf 'x"], "--worker-args: No closing quotation"),
        (["--router-args", "'"], "--router-args: No closing quotation"),
        (["--dyn-tool-call-parser", "hermees"], "unknown parser 'hermees'; known: "),
        (["--dyn-reasoning-parser", "deep"], "--dyn-reasoning-parser: unknown parser 'deep'; known: "),
    ],
)
def test_what_its_processes_would_refuse_is_refused_before_they_start(flags: list[str], words: str) -> None:
    assert words in _refusal(_ampd("serve", "--engine", "modelled", "--port", "0", *flags))


def test_redis_that_does_not_answer_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://user:secret@127.0.0.1:{silent.getsockname()[1]}/0"
        result = _ampd("serve", "--engine", "modelled", "--state-url", url)
    assert "--state-url" in _refusal(result)
    assert "user:secret" not in result.stderr


@pytest.mark.parametrize(
    ("flag", "password"), [("--state-url", "S3c/r3t"), ("--state-url", "S3c%2Fr3t"), ("--state-ulr", "S3c/r3t")]
)
def test_no_part_of_a_password_is_shown(flag: str, password: str) -> None:
    result = _ampd("serve", "--engine", "modelled", flag, f"redis://ampd:{password}@127.0.0.1:1/0")
    assert flag == "--state-ulr" or "state" in _refusal(result)
    assert "S3c" not in result.stderr
    assert "r3t" not in result.stderr


def test_redis_url_that_nothing_listens_on_is_refused() -> None:
    (port,) = free_ports(1)
    line = _refusal(_ampd("serve", "--engine", "modelled", "--state-url", f"redis://127.0.0.1:{port}/0"))
    assert str(port) in line


def test_state_url_of_another_kind_is_refused() -> None:
    assert "redis://" in _refusal(_ampd("serve", "--engine", "modelled", "--state-url", "etcd://127.0.0.1"))


def test_scripted_replies_that_cannot_be_played(tmp_path: Path) -> None:
    replies = tmp_path / "replies.jsonl"
    replies.write_text('{"content": "a"}\n{"contents": "b"}\n')
    assert "replies.jsonl:2" in _refusal(_ampd("serve", "--engine", "modelled", "--replies", str(replies)))
    assert "--engine modelled" in _refusal(_ampd("serve", "--engine", "sglang", "--replies", str(replies)))


def test_model_folder_that_does_not_exist(tmp_path: Path) -> None:
    assert str(tmp_path / "none") in _refusal(_ampd("serve", "--engine", "modelled", "--model", str(tmp_path / "none")))


def test_a_name_of_the_hub_is_no_folder() -> None:
    assert "hf download Qwen/Qwen3-8B" in _refusal(_ampd("serve", "--engine", "modelled", "--model", "Qwen/Qwen3-8B"))


def test_a_log_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = _refusal(_ampd("serve", "--engine", "modelled", "--port", "0", "--log-dir", str(tmp_path / "file")))
    assert f"--log-dir: {tmp_path / 'file'}" in line


def test_a_cache_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "XDG_CACHE_HOME" in _refusal(_ampd("serve", "--engine", "modelled"))


def test_model_folder_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model_path() / "config.json").read_text())
    line = _refusal(_ampd("serve", "--engine", "modelled", "--model", str(tmp_path)))
    assert "tokenizer" in line
    assert str(tmp_path) in line


def test_malformed_trace_line_names_file_and_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    good = {"session_id": "s1", "arrival_s": 0.0, "rounds": [{"incr_tokens": 5, "output_tokens": 2, "tool_s": 0.0}]}
    trace.write_text(json.dumps(good) + "\n" + '{"session_id": "s2", "rounds": [}\n')
    for command in (("replay", str(trace), "--url", "http://127.0.0.1:1"), ("trace", "stats", str(trace))):
        line = _refusal(_ampd(*command))
        assert f"{trace}:2" in line or (str(trace) in line and "line 2" in line)


@pytest.mark.parametrize(
    "command",
    [
        ("replay", "tau-bench-airline", "--time-scale", "inf"),
        ("simulate", "tau-bench-airline", "--perf", "tiny-cpu", "--max-wait", "inf"),
    ],
)
def test_a_number_without_end_is_refused(command: tuple[str, ...]) -> None:
    assert "finite" in _refusal(_ampd(*command))


def test_a_url_that_cannot_be_read_is_named() -> None:
    assert "--url http://[::1" in _refusal(_ampd("replay", "tau-bench-airline", "--url", "http://[::1"))


def test_unknown_trace_lists_the_shipped_ones() -> None:
    assert "tau-bench" in _refusal(_ampd("trace", "stats", "no-such-trace"))


def test_parallelism_that_the_performance_model_lacks_lists_the_known_ones() -> None:
    assert "it has tp 1, 2, 4" in _refusal(_ampd("serve", "--engine", "modelled", "--tp", "8"))
