"""Tries every feature of every client against a graph, and prints the table of docs/clients.md.

    make clients && python -m benchmarks.clients [--engine sglang] [--json]

The packages of the extra `clients` do not fit beside SGLang, so `make clients` gives them an environment of their own.
CLIENTS_PYTHON names another interpreter that has them. The modelled engine plays scripted replies, so that the loops of
agents with their tools run. On SGLang the rows without a script are tried.
Every row is a session of its own. Column `session`: the graph knew that session afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from ampd.cli.serve.local_graphs import local_graphs
from ampd.cli.serve.running import running_graph
from ampd.errors import guarded
from ampd.wire import SESSIONS_ROUTE
from benchmarks.clients.cases import CLIENTS, replies
from benchmarks.clients.environment import clients_python
from benchmarks.clients.feature import CONTEXT_TOKENS, Client, Feature, session_of

PYTHON = clients_python()
_TIMEOUT_S = 600.0
_RUN = """
import json, linecache, sys, warnings
warnings.simplefilter("ignore")
for name, session, code in json.load(sys.stdin):
    scope = {"URL": sys.argv[1], "SESSION": session}
    try:
        # smolagents reads the source of a tool.
        linecache.cache[session] = (len(code), None, code.splitlines(True), session)
        exec(compile(code, session, "exec"), scope)
        error = ""
    except BaseException as failure:
        error = f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:200]
    print("RESULT " + json.dumps([name, error]), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One feature of one client. `error`: empty if it works; `is_session`: the graph knew the row's session."""

    client: str
    feature: str
    before: str
    error: str
    is_session: bool | None

    @property
    def state(self) -> str:
        return self.error or "works"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("modelled", "sglang"), default="modelled")
    parser.add_argument("--client", action="append", choices=[client.name for client in CLIENTS], help="only these")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ampd-clients-") as folder:
        clients = [client for client in CLIENTS if not arguments.client or client.name in arguments.client]
        rows = list(_rows(clients, arguments.engine, Path(folder)))
    if arguments.json:
        print(json.dumps({"engine": arguments.engine, "rows": [asdict(row) for row in rows]}))
    else:
        print(table(rows))
    return 1 if any(row.error for row in rows) else 0


def _rows(clients: Sequence[Client], engine: str, folder: Path) -> Iterator[Row]:
    script = folder / "replies.jsonl"
    script.write_text(replies(), encoding="utf-8")
    flags = ["--engine", engine, "--prefill", "1", "--decode", "1", "--port", "0", "--routing", "always-remote"]
    flags += ["--dyn-tool-call-parser", "hermes", f"--worker-args=--max-context-tokens {CONTEXT_TOKENS}"]
    flags += ["--max-wait", "0", "--start-timeout-s", "900"]
    flags += ["--replies", str(script)] if engine == "modelled" else []
    with running_graph(flags, _progress, {**os.environ, "DYN_ENABLE_ANTHROPIC_API": "1"}) as url:
        (control,) = (graph.controls[0] for graph in local_graphs() if graph.url == url)
        for client in clients:
            features = [each for each in client.features if engine == "modelled" or not each.replies]
            if features:
                yield from _tried(client, features, url, control)


def _tried(client: Client, features: list[Feature], url: str, control: str) -> Iterator[Row]:
    environment = {**os.environ, "OPENAI_API_KEY": "none", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    environment.pop("PYTHONPATH", None)
    _progress(client.name)
    tasks = [(each.name, session_of(client, each), f"{client.preamble}\n{each.code}") for each in features]
    done = subprocess.run(
        [PYTHON, "-c", _RUN, url],
        input=json.dumps(tasks),
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if "ModuleNotFoundError" in done.stdout:
        _progress(f"  {PYTHON} has no {client.module}; its rows are left out")
        return
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    results = [json.loads(line)[1] for line in lines]
    for index, feature in enumerate(features):
        error = results[index] if index < len(results) else "the client's process ended"
        known = _is_known(control, session_of(client, feature)) if feature.replies else None
        row = Row(client.name, feature.name, feature.before, error, known)
        _progress(f"  {row.state}: {row.feature}")
        yield row


def _is_known(control: str, session: str) -> bool:
    """Whether a worker holds KV of the session."""
    reply = httpx.post(f"{control}/engine/{SESSIONS_ROUTE}/show", json={"session_id": session}, trust_env=False)
    return bool(reply.is_success and reply.json().get("held_tokens"))


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| client | feature | before | now | session |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        session = "" if row.is_session is None else "one" if row.is_session else "**none**"
        state = row.state.replace("|", "\\|")
        lines.append(f"| {row.client} | {row.feature} | {row.before} | {state} | {session} |")
    return "\n".join(lines)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(guarded(main))
