"""How `ampd top` finds the graphs that `ampd serve` runs on this machine: a note beside the socket of their Redis.

The folder is the user's own and goes with the Redis; a note whose Redis does not answer counts as left behind.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ValidationError

from ampd.state.embedded import FOLDER_PREFIX, answers, servers_folder, socket_of

_NOTE = "graph.json"


class RunningGraph(BaseModel, frozen=True):
    """A graph on an embedded Redis.

    Attributes:
        state_url: its Redis.
        url: its frontend.
        perf: its performance model.
    """

    namespace: str
    state_url: str
    url: str
    perf: str


def announce(graph: RunningGraph) -> None:
    """Leave the note of a graph whose Redis is an embedded one of this process."""
    (socket_of(graph.state_url).parent / _NOTE).write_text(graph.model_dump_json(), encoding="utf-8")


def running_graphs() -> list[RunningGraph]:
    """The graphs of this user that were announced on this machine and whose Redis answers."""
    found = (_read(note) for note in sorted(servers_folder().glob(f"{FOLDER_PREFIX}*/{_NOTE}")))
    return [graph for graph in found if graph is not None and answers(socket_of(graph.state_url))]


def _read(note: Path) -> RunningGraph | None:
    try:
        if note.parent.stat().st_uid != os.getuid():
            return None  # anybody may make such a folder
        return RunningGraph.model_validate_json(note.read_bytes())
    except (OSError, ValidationError):
        return None
