"""Tries every feature of every client against a graph, and prints the table of benchmarks/results/clients.csv.

    make clients && python -m benchmarks.clients [--engine sglang] [--json] [--write benchmarks/results]

The packages of the extra `clients` do not fit beside SGLang, so `make clients` gives them environments of their own.
CLIENTS_PYTHON, CLIENTS_AIPERF and CLIENTS_NODE_MODULES name others. The modelled engine plays scripted replies, so that
the loops of agents with their tools run. On SGLang the rows without a script are tried.
Every row is a session of its own. Column `session`: the graph knew that session afterwards.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ampd.errors import guarded
from ampd.tiny_model import tiny_model_path
from benchmarks.clients import aiperf, runners
from benchmarks.clients.cases import CLIENTS, replies
from benchmarks.clients.environment import ask_sessions, versions
from benchmarks.clients.feature import CONTEXT_TOKENS, Client, Feature, session_of
from benchmarks.clients.programs import PROGRAMS
from benchmarks.clients.programs import rows as program_rows
from benchmarks.clients.table import Row, table
from benchmarks.result_files import write
from tools.demo import running_graph


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("modelled", "sglang"), default="modelled")
    known = [*(client.name for client in CLIENTS), aiperf.CLIENT, *(each.client for each in PROGRAMS)]
    parser.add_argument("--client", action="append", choices=known, help="only these")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the table to clients.csv there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ampd-clients-") as folder:
        rows = list(_rows(arguments.client or known, arguments.engine, Path(folder)))
    found = versions(sorted({row.client for row in rows}))
    if arguments.write:
        write(arguments.write, "clients", {"": table(rows, found)}, "python -m benchmarks.clients")
    if arguments.json:
        whole = {"engine": arguments.engine, "versions": found, "rows": [asdict(row) for row in rows]}
        print(json.dumps(whole))
    else:
        print(table(rows, found))
    return 1 if any(row.error for row in rows) else 0


def _rows(wanted: Sequence[str], engine: str, folder: Path) -> Iterator[Row]:
    script, logs = folder / "replies.jsonl", folder / "logs"
    script.write_text(replies(), encoding="utf-8")
    # Two decode workers, so that a session without affinity would move between them.
    flags = ["--engine", engine, "--prefill", "1", "--decode", "2", "--port", "0", "--routing", "always-remote"]
    flags += ["--dyn-tool-call-parser", "hermes", f"--worker-args=--max-context-tokens {CONTEXT_TOKENS}"]
    flags += ["--pools", "static", "--max-wait", "0", "--log-dir", str(logs)]
    flags += ["--replies", str(script)] if engine == "modelled" else []
    with running_graph(flags, _progress) as url:
        for client in CLIENTS:
            features = [each for each in client.features if engine == "modelled" or not each.replies]
            if features and client.name in wanted:
                yield from _tried(client, features, url)
        if aiperf.CLIENT in wanted:
            yield from _told(aiperf.rows(url, logs, tiny_model_path(), folder), aiperf.CLIENT)
    for program in PROGRAMS if engine == "modelled" else ():
        if program.client in wanted:
            yield from _told(program_rows(program, folder, _progress), program.client)


def _tried(client: Client, features: list[Feature], url: str) -> list[Row]:
    errors = runners.errors(client, features, url)
    rows = [
        Row(
            client.name,
            feature.name,
            feature.before,
            error,
            _is_known(url, session_of(client, feature)) if feature.replies and not feature.fault else None,
            fault=feature.fault,
        )
        for feature, error in zip(features, errors or (), strict=errors is not None)
    ]
    return _told(rows, client.name)


def _told(rows: list[Row], client: str) -> list[Row]:
    """The rows, after they were shown."""
    _progress(client if rows else f"{client}: not installed, so that its rows are left out")
    for row in rows:
        _progress(f"  {row.state}: {row.feature}")
    return rows


def _is_known(url: str, session: str) -> bool:
    """Whether a worker holds KV of the session."""
    return bool(ask_sessions(url, "show", session_id=session).get("held_tokens"))


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(guarded(main))
