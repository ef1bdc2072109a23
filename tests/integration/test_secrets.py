"""Where secrets and prompts could show: a whole run of a graph is searched for them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.tcp_redis import TcpRedis
from tests.harness.watches import wait_for_watches
from tests.integration.test_serve import PROCESSES, _command, _descendants
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PASSWORD = "s3cr3tpassw0rd"
GRAPH_SECRET = "s3cr3tofthegraph"
PROMPT_WORD = "zyzzyvas"
SEARCHED = (PASSWORD, GRAPH_SECRET, PROMPT_WORD)


class Run:
    """`ampd serve` with a Redis that wants a password and with a secret of the graph, and all that it leaves behind.

    Attributes:
        found: where -> text, to search.
    """

    def __init__(self, folder: Path, state_url: str, flags: Sequence[str]) -> None:
        self.folder = folder
        self.found: dict[str, str] = {}
        secret = folder / "graph-secret"
        secret.write_text(GRAPH_SECRET)
        self._environment = {**os.environ, "AMPD_STATE_URL": state_url, "AMPD_LOG_ROUNDS": "steps"}
        argv = [sys.executable, "-m", "ampd", "serve", "--engine", "modelled", "--port", "0", "--namespace", "secrets"]
        argv += [
            "--routing",
            "always-remote",
            "--graph-secret-file",
            str(secret),
            "--log-dir",
            str(folder / "logs"),
            *flags,
        ]
        wait_for_watches(PROCESSES)
        self._errors = (folder / "stderr").open("w")
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=self._environment
        )
        self.url = ""

    def until_ready(self) -> None:
        """Wait until the graph serves."""
        assert self.process.stdout is not None
        self.found["stdout"] = self.process.stdout.readline()
        assert self.found["stdout"].startswith("ready: "), (self.folder / "stderr").read_text()
        self.url = self.found["stdout"].split()[1]

    def command(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command beside the graph."""
        argv = [sys.executable, "-m", "ampd", *arguments]
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env=self._environment,
            cwd=self.folder,
        )
        self.found[name] = done.stdout + done.stderr
        return done

    def look_at_processes(self) -> None:
        """Command lines and metrics of everything that runs, and the environment of the frontend."""
        for pid in (self.process.pid, *_descendants(self.process.pid)):
            self.found[f"command line of {pid}"] = command = _command(pid)
            if "dynamo.frontend" in command or "status_relay" in command:
                environment = Path(f"/proc/{pid}/environ").read_text().replace("\0", "\n")
                self.found[f"environment of the frontend {pid}"] = environment
        for target in json.loads((self.folder / "logs" / "metrics.json").read_text()):
            name = target["labels"]["process"]
            self.found[f"metrics of {name}"] = httpx.get(
                f"http://{target['targets'][0]}/metrics", timeout=PATIENCE_S
            ).text

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.stdout is not None
        self.found["stdout"] += self.process.stdout.read()
        self.process.wait(PATIENCE_S)
        self._errors.flush()
        for path in self.folder.rglob("*"):
            if path.is_file() and path.name != "graph-secret":
                self.found[str(path.relative_to(self.folder))] = path.read_text(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


@contextlib.contextmanager
def running(folder: Path, state_url: str, flags: Sequence[str] = ()) -> Iterator[Run]:
    run = Run(folder, state_url, flags)
    try:
        run.until_ready()
        yield run
    finally:
        run.close()


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--no-status-relay",)], ids=["relay", "frontend"])
def test_no_secret_and_no_prompt_shows_anywhere(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with (
        redis_with(PASSWORD) as redis,
        running(tmp_path, f"redis://ampd:{PASSWORD}@127.0.0.1:{redis.port}/0", flags) as run,
    ):
        answers = rounds(run)
        assert run.command("top", "top", "--namespace", "secrets", "--once").returncode == 0
        report = ("--json", "replay.json", "--report", "replay.html")
        replay = ("replay", "tau-bench-airline", "--url", run.url, "--limit", "2", "--time-scale", "0", *report)
        assert run.command("replay", *replay).returncode == 0
        run.look_at_processes()
        run.end()
        run.found |= answers
    assert {"stdout", "stderr", "replay.json", "replay.html", "top", "metrics of frontend"} <= run.found.keys()
    assert sum(name.startswith("logs/") and name.endswith(".log") for name in run.found) == 4
    assert sum(name.startswith("command line") for name in run.found) >= 5
    assert sum(name.startswith("environment of the frontend") for name in run.found) == (1 if flags else 2)
    assert "picked" in "".join(run.found.values()), "the steps of rounds are logged"
    shown = {
        f"{secret}: {where}: {line.strip()[:300]}"
        for where, text in run.found.items()
        for line in text.splitlines()
        for secret in SEARCHED
        if secret in line
    }
    assert shown == set()


def redis_with(password: str) -> TcpRedis:
    """A Redis whose user `ampd` has this password."""
    return TcpRedis(["--user", "ampd", "on", f">{password}", "~*", "&*", "+@all", "--requirepass", "root"])


def rounds(run: Run) -> dict[str, str]:
    """Rounds that go well, and errors of clients; returns the texts of the errors."""
    text = f"{PROMPT_WORD} " * 40
    bodies: dict[str, dict[str, Any]] = {
        "served": {"prompt": text, "max_tokens": 4},
        "too long": {"prompt": text * 2000, "max_tokens": 4},
        "wrong type": {"prompt": text, "max_tokens": "many"},
        "no such token": {"prompt": [5, 4_000_000_000], "max_tokens": 4},
        "no such option": {"prompt": text, "max_tokens": 4, "nvext": {"annotations": ["ttft_target:never"]}},
    }
    answers = {}
    for name, body in bodies.items():
        reply = httpx.post(f"{run.url}/v1/completions", json={"model": "tiny", **body}, timeout=PATIENCE_S)
        assert (reply.status_code == 200) == (name == "served") or name == "no such option", (name, reply.text[:500])
        if reply.status_code != 200:
            answers[f"answer to {name}"] = reply.text
    return answers


def test_a_redis_that_refuses_the_password_is_named_without_it() -> None:
    with redis_with("another") as redis:
        environment = {**os.environ, "AMPD_STATE_URL": f"redis://ampd:{PASSWORD}@127.0.0.1:{redis.port}/0"}
        argv = [sys.executable, "-m", "ampd", "serve", "--engine", "modelled", "--port", "0"]
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env=environment,
        )
    assert done.returncode == 2
    assert "--state-url" in done.stderr
    assert PASSWORD not in done.stderr + done.stdout
