"""The tables of what the coordinator costs, as the pages have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import markdown_table

STATUS = "status"
"""The graph with a coordinator, through a frontend with the status relay before it."""

RELAY = "status_relay"
"""The status relay's process, as the part of a graph."""

_MIDDLE = "coordinator (or relay)"
_PARTS = {
    "coordinator": _MIDDLE,
    "relay": _MIDDLE,
    "worker": "worker",
    "frontend": "frontend",
    RELAY: "status relay",
}
_PER = {"token_us": "per token", "round_us": "per round besides its tokens"}


def cpu(results: Mapping[str, Any]) -> str:
    """CPU time in us per token and per round, with a column for each graph."""
    return "\n\n".join(
        f"{name.removeprefix('concurrency_')} client(s), us of CPU time\n\n" + "\n\n".join(_cpu_tables(figures))
        for name, figures in results.items()
        if name.startswith("concurrency_")
    )


def _cpu_tables(figures: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    graphs = sorted({process.partition("-")[2] for process in figures}, key=_place)
    for key, label in _PER.items():
        rows: dict[str, dict[str, float]] = {part: {} for part in _PARTS.values()}
        for process, each in figures.items():
            part, _, graph = process.partition("-")
            rows[_PARTS[part]][graph] = each[key]
        rows = {part: row for part, row in rows.items() if row}
        rows["all"] = {graph: sum(row.get(graph, 0.0) for row in rows.values()) for graph in graphs}
        lines = [
            [name, *(f"{row[graph]:,.0f}" if graph in row else "-" for graph in graphs)] for name, row in rows.items()
        ]
        yield markdown_table.table([label, *map(_title, graphs)], lines)


def _place(graph: str) -> tuple[int, int]:
    """The graphs without a coordinator come first, and then those with one by their number of tokens."""
    return ("without", "relay", "with", STATUS, "against").index(graph.partition("-")[0]), _tokens(graph)


def _tokens(graph: str) -> int:
    return int(graph.partition("-")[2] or 1)


def _title(graph: str) -> str:
    names = {
        "without": "frontend -> worker",
        "relay": "a relay",
        "against": "the other checkout",
        STATUS: "a coordinator and the status relay",
    }
    return names.get(graph) or f"N = {_tokens(graph)}"


def times(results: Mapping[str, Any]) -> str:
    """TTFT, whole streams and requests per second, with the ratios to the graph without a coordinator.

    The ratios of the status relay are to the graph that it is before.
    """
    rows = []
    for name, figures in results.items():
        if not name.startswith("concurrency_"):
            continue
        clients = name.removeprefix("concurrency_")
        plain = figures["without"]
        rows.append([f"{clients} client(s): frontend -> worker", *_times(plain)])
        for graph, each in figures.items():
            if graph in ("without", "ratio") or graph.endswith("_ratio"):
                continue
            ratio = figures[f"{STATUS}_ratio"] if graph == STATUS else {key: each[key] / plain[key] for key in plain}
            ratios = [f"{ratio[key]:.2f}" for key in plain]
            cells = [f"{value} ({ratio})" for value, ratio in zip(_times(each), ratios, strict=True)]
            title = f"a coordinator, {_title(graph)}" if graph.startswith("with") else _title(graph)
            rows.append([f"with {title}", *cells])
    return markdown_table.table(["", "TTFT", "whole stream", "requests/s"], rows)


def _times(figures: Mapping[str, float]) -> list[str]:
    return [f"{1e3 * figures[key]:.2f} ms" for key in ("ttft_s", "total_s")] + [f"{figures['requests_per_s']:.0f}"]
