"""Where the packages of the clients are, and what a graph says of their sessions.

The packages do not fit beside SGLang, so `make clients` puts them elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

from ampd.state.embedded import graphs_at
from ampd.wire import SESSIONS_ROUTE

PYTHON_VARIABLE, AIPERF_VARIABLE, NODE_VARIABLE = "CLIENTS_PYTHON", "CLIENTS_AIPERF", "CLIENTS_NODE_MODULES"
_HERE = Path(sys.prefix)


def clients_python(environment: Path = _HERE) -> str:
    """The interpreter that CLIENTS_PYTHON names, else that of `make clients`, else this one.

    Args:
        environment: the virtual environment in which `make clients` has made others.
    """
    own = environment / "clients" / "bin" / "python"
    return os.environ.get(PYTHON_VARIABLE) or str(own if own.is_file() else sys.executable)


def aiperf_program(environment: Path = _HERE) -> str | None:
    """The program that CLIENTS_AIPERF names, else that of `make clients`; None: there is none."""
    own = environment / "aiperf" / "bin" / "aiperf"
    return os.environ.get(AIPERF_VARIABLE) or (str(own) if own.is_file() else None)


def clients_node_modules(environment: Path = _HERE) -> Path:
    """The folder of npm packages that CLIENTS_NODE_MODULES names, else that of `make clients`."""
    chosen = os.environ.get(NODE_VARIABLE)
    return Path(chosen) if chosen else environment / "clients-js" / "node_modules"


_PACKAGES = {
    "pydantic-ai": "pydantic-ai-slim",
    "LlamaIndex": "llama-index-core",
    "Vercel AI SDK": "ai",
    "Codex CLI": "@openai/codex",
    "Claude Code": "@anthropic-ai/claude-code",
}
"""Clients whose package has another name."""

_INSTALLED = """
import json
from importlib.metadata import distributions
print(json.dumps({each.name.lower(): each.version for each in distributions()}))
"""


def versions(clients: Iterable[str]) -> dict[str, str]:
    """The versions of clients; "" of those that are not installed."""
    program = aiperf_program()
    interpreters = [clients_python(), *([str(Path(program).with_name("python"))] if program else [])]
    installed: dict[str, str] = {}
    for interpreter in interpreters:
        listed = subprocess.run([interpreter, "-I", "-c", _INSTALLED], capture_output=True, text=True, check=False)
        installed = {**json.loads(listed.stdout or "{}"), **installed}
    for name in ("ai", "@openai/codex", "@anthropic-ai/claude-code"):
        about = clients_node_modules() / name / "package.json"
        installed[name] = json.loads(about.read_text(encoding="utf-8"))["version"] if about.is_file() else ""
    return {client: installed.get(_PACKAGES.get(client, client.lower()), "") for client in clients}


def ask_sessions(url: str, operation: str, **body: Any) -> dict[str, Any]:
    """What a coordinator of the graph at `url` says of its sessions."""
    (graph,) = graphs_at(url)
    route = f"{graph.controls[0]}/engine/{SESSIONS_ROUTE}/{operation}"
    reply = httpx.post(route, json={**body, "token": graph.token}, trust_env=False)
    answer: dict[str, Any] = reply.raise_for_status().json()
    return answer
