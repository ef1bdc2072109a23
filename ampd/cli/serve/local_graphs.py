"""Lets `ampd top` and `ampd session` find the graphs that `ampd serve` runs on this machine.

Each graph has a file beside the socket of its Redis. The folder belongs to the user and is deleted with the Redis. A
file whose Redis does not answer is stale and ignored.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ValidationError

from ampd.state.embedded import FOLDER_PREFIX, answers, servers_folder, socket_of

_FILE = "graph.json"


class LocalGraph(BaseModel, frozen=True):
    """A graph on an embedded Redis.

    Attributes:
        state_url: its Redis.
        url: its frontend.
        perf: its performance model.
        controls: the system ports of its coordinators; empty: they have none.
    """

    namespace: str
    state_url: str
    url: str
    perf: str
    controls: tuple[str, ...] = ()


def register(graph: LocalGraph) -> None:
    """Write the file of a graph whose embedded Redis this process started."""
    (socket_of(graph.state_url).parent / _FILE).write_text(graph.model_dump_json(), encoding="utf-8")


def local_graphs() -> list[LocalGraph]:
    """This user's registered graphs whose Redis answers."""
    found = (_read(file) for file in sorted(servers_folder().glob(f"{FOLDER_PREFIX}*/{_FILE}")))
    return [graph for graph in found if graph is not None and answers(socket_of(graph.state_url))]


def _read(file: Path) -> LocalGraph | None:
    try:
        if file.parent.stat().st_uid != os.getuid():
            return None  # every user may create such a folder
        return LocalGraph.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None
