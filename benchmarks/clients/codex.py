"""The row of Codex CLI. It is a program with a long prompt, and has a graph of its own with a longer context."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.clients.environment import ask_sessions, clients_node_modules
from benchmarks.clients.feature import call
from benchmarks.clients.table import Row
from tools.demo import running_graph

CLIENT = "Codex CLI"
_TIMEOUT_S = 600.0
_REPLIES = (
    {"tool_calls": [call("exec_command", cmd="echo 4711 > seen")]},
    {"content": "It is done."},
)


def rows(folder: Path, progress: Callable[[str], None]) -> list[Row]:
    """The row, or none if the program is not installed. `folder` is for scratch."""
    program = clients_node_modules() / ".bin" / "codex"
    if not program.exists():
        return []
    script, work, home = folder / "codex.jsonl", folder / "codex-work", folder / "codex-home"
    work.mkdir()
    home.mkdir()
    script.write_text("\n".join(map(json.dumps, _REPLIES)) + "\n", encoding="utf-8")
    flags = ["--engine", "modelled", "--port", "0", "--prefill", "1", "--decode", "1", "--routing", "always-remote"]
    flags += ["--pools", "static", "--dyn-tool-call-parser", "hermes", "--max-wait", "0", "--replies", str(script)]
    with running_graph(flags, progress) as url:
        done = subprocess.run(
            command(program, url),
            cwd=work,
            env={**os.environ, "CODEX_HOME": str(home), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        is_session = len(ask_sessions(url, "list")["sessions"]) == 1  # a round without a name would leave none
    name = "`codex exec`, a command and the answer, with its own session id"
    return [Row(CLIENT, name, "", _error(done, work / "seen"), is_session)]


def command(program: Path, url: str) -> list[str]:
    """The command line, with the provider that docs/clients.md shows."""
    provider = f'model_providers.ampd={{name="AMPD",base_url="{url}/v1",wire_api="responses"}}'
    chosen = ["-c", "model_provider=ampd", "-c", provider, "-c", 'web_search="disabled"', "-m", "tiny"]
    return [str(program), "exec", "--skip-git-repo-check", "-s", "danger-full-access", *chosen, "Write the number"]


def _error(done: subprocess.CompletedProcess[str], written: Path) -> str:
    if done.returncode == 0 and "It is done." in done.stdout and written.is_file():
        return ""
    last = [*done.stdout.splitlines(), *done.stderr.splitlines(), "no message"][-2:]
    return f"exit code {done.returncode}: {' '.join(last)}"[:200]
