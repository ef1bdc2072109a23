"""Where the packages of the clients are, and what a graph says of their sessions.

The packages do not fit beside SGLang, so `make clients` puts them elsewhere.
"""

from __future__ import annotations

import os
import sys
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


def ask_sessions(url: str, operation: str, **body: Any) -> dict[str, Any]:
    """What a coordinator of the graph at `url` says of its sessions."""
    (graph,) = graphs_at(url)
    route = f"{graph.controls[0]}/engine/{SESSIONS_ROUTE}/{operation}"
    reply = httpx.post(route, json={**body, "token": graph.token}, trust_env=False)
    answer: dict[str, Any] = reply.raise_for_status().json()
    return answer
