"""The processes of a graph that a benchmark has started: their kinds, CPU time, memory and the manifest's limits."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import yaml

from ampd.types import GIB

_PROCESSES = {
    "prefill": "prefill",
    "decode": "decode",
    "coordinator": "router",
    "frontend": "dynamo.frontend",
    "relay": "router.status_relay",
}
"""Kind of process -> the argument of its command line that names it."""
_PAGE_BYTES, _TICKS_PER_S = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")

CONTAINER_OF = {"relay": "frontend"}
"""Kinds of processes that share the container, and so the memory limit, of another kind."""

MANIFEST = Path(__file__).parents[1] / "k8s" / "base" / "graph.yaml"


def cpu_s() -> dict[str, float]:
    """Kind of process -> seconds of CPU that all of them used."""
    used = defaultdict[str, float](float)
    for kind, pid in graph_processes():
        with suppress(OSError, IndexError):
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            used[kind] += sum(map(int, ticks)) / _TICKS_PER_S
    return dict(used)


def graph_processes() -> Iterator[tuple[str, int]]:
    """The graph's processes with their kinds."""
    for pid in _descendants(os.getpid()):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            kind = next((kind for kind, word in _PROCESSES.items() if word in words), None)
            if kind is not None and "serve" not in words:
                yield kind, pid


def _descendants(pid: int) -> list[int]:
    """The processes that this one started, and those that they started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found + [below for child in found for below in _descendants(child)]


def memory_bytes() -> dict[str, int]:
    """Kind of process -> the memory of all of them (RSS)."""
    used = Counter[str]()
    for kind, pid in graph_processes():
        with suppress(OSError, IndexError):  # it has just ended
            used[kind] += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    return dict(used)


def memory_limits() -> dict[str, int]:
    """Kind of process -> the limit of its memory in the manifest."""
    limits = {}
    for component in yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))["spec"]["components"]:
        for container in component["podTemplate"]["spec"]["containers"]:
            memory = container.get("resources", {}).get("limits", {}).get("memory")
            if container["name"] == "main" and memory:
                limits[component["name"]] = int(memory.removesuffix("Gi")) * GIB
    return limits
