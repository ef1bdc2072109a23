"""The rows of agents that are programs. Their prompts are long, so each has a graph with a longer context."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clients.environment import ask_sessions, clients_node_modules
from benchmarks.clients.feature import call
from benchmarks.clients.table import Row
from tools.demo import running_graph

_TIMEOUT_S = 600.0
_TASK = "Write the number"


@dataclass(frozen=True, slots=True)
class Program:
    """An agent program of npm.

    Attributes:
        file: the name of its executable.
        tool: its call that writes the number.
        command: the command line behind the executable, from the graph's address.
        variables: of its environment, from the graph's address and a folder for its files.
    """

    client: str
    file: str
    feature: str
    tool: dict[str, Any]
    command: Callable[[str], list[str]]
    variables: Callable[[str, Path], dict[str, str]]


def codex_command(url: str) -> list[str]:
    """The command line, with the provider that docs/clients.md shows."""
    provider = f'model_providers.ampd={{name="AMPD",base_url="{url}/v1",wire_api="responses"}}'
    chosen = ["-c", "model_provider=ampd", "-c", provider, "-c", 'web_search="disabled"', "-m", "tiny"]
    return ["exec", "--skip-git-repo-check", "-s", "danger-full-access", *chosen, _TASK]


def _claude_variables(url: str, home: Path) -> dict[str, str]:
    own = {"CLAUDE_CONFIG_DIR": str(home), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return {**own, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_MODEL": "tiny", "ANTHROPIC_API_KEY": "none"}


CODEX = Program(
    "Codex CLI",
    "codex",
    "`codex exec`, a command and the answer, with its own session id",
    call("exec_command", cmd="echo 4711 > seen"),
    codex_command,
    lambda _, home: {"CODEX_HOME": str(home)},
)
CLAUDE_CODE = Program(
    "Claude Code",
    "claude",
    "`claude -p`, a command and the answer, with its own session id",
    call("Bash", command="echo 4711 > seen", description="Write the number"),
    lambda _: ["-p", _TASK, "--allowedTools", "Bash"],
    _claude_variables,
)
PROGRAMS = (CODEX, CLAUDE_CODE)


def rows(program: Program, folder: Path, progress: Callable[[str], None]) -> list[Row]:
    """The row, or none if the program is not installed. `folder` is for scratch."""
    executable = clients_node_modules() / ".bin" / program.file
    if not executable.exists():
        return []
    script, work, home = (folder / f"{program.file}-{name}" for name in ("replies.jsonl", "work", "home"))
    work.mkdir()
    home.mkdir()
    replies = ({"tool_calls": [program.tool]}, {"content": "It is done."})
    script.write_text("\n".join(map(json.dumps, replies)) + "\n", encoding="utf-8")
    flags = ["--engine", "modelled", "--port", "0", "--prefill", "1", "--decode", "1", "--routing", "always-remote"]
    flags += ["--pools", "static", "--dyn-tool-call-parser", "hermes", "--max-wait", "0", "--replies", str(script)]
    with running_graph([*flags, "--perf", "qwen3-32b@h200"], progress) as url:
        local = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        done = subprocess.run(
            [str(executable), *program.command(url)],
            cwd=work,
            env={**os.environ, **local, **program.variables(url, home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        is_session = len(ask_sessions(url, "list")["sessions"]) == 1  # a round without a name would leave none
    return [Row(program.client, program.feature, "", _error(done, work / "seen"), is_session)]


def _error(done: subprocess.CompletedProcess[str], written: Path) -> str:
    if done.returncode == 0 and "It is done." in done.stdout and written.is_file():
        return ""
    last = [*done.stdout.splitlines(), *done.stderr.splitlines(), "no message"][-2:]
    return f"exit code {done.returncode}: {' '.join(last)}"[:200]
