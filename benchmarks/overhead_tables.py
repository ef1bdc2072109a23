"""The tables of what the coordinator costs, as the pages have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import markdown_table

STATUS = "status"
"""The graph with a coordinator, through a frontend with the status relay before it."""

RELAY = "status_relay"
"""The status relay's process, as the part of a graph."""

_PARTS = {"coordinator": "coordinator", "worker": "worker", "frontend": "frontend", RELAY: "status relay"}
_PER = {"token_us": "per token", "round_us": "per round besides its tokens"}


def cpu(results: Mapping[str, Any]) -> str:
    """CPU time in us per token and per round, with a column for each graph."""
    return "\n\n".join(
        f"{clients} client(s), us of CPU time\n\n" + "\n\n".join(_cpu_tables(figures))
        for clients, figures in _by_clients(results, "concurrency_")
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
    """The graph without a coordinator comes first, and then those with one by their number of tokens."""
    return ("without", "pipe", "with", STATUS, "against").index(graph.partition("-")[0]), _tokens(graph)


def _tokens(graph: str) -> int:
    return int(graph.partition("-")[2] or 1)


def _title(graph: str) -> str:
    names = {
        "without": "frontend -> worker",
        "pipe": "the pipe",
        "against": "the other checkout",
        STATUS: "a coordinator and the status relay",
    }
    return names.get(graph) or f"N = {_tokens(graph)}"


def times(results: Mapping[str, Any]) -> str:
    """TTFT, whole streams and requests per second, with the ratios to the graph without a coordinator."""
    rows = []
    for clients, figures in _by_clients(results, "times_"):
        plain = figures["without"]
        for graph in sorted(figures, key=_place):
            each = figures[graph]
            cells = [f"{value} ({each[key] / plain[key]:.2f})" for key, value in zip(plain, _times(each), strict=True)]
            rows.append([f"{clients} client(s): {_title(graph)}", *cells])
    return markdown_table.table(["", "TTFT", "whole stream", "requests/s"], rows)


def aims(results: Mapping[str, Any]) -> str:
    """What each way costs beside frontend -> worker, as the aims are worded."""
    tokens, cpu_times = results["long_tokens"], dict(_by_clients(results, "concurrency_"))
    rows = []
    for clients, figures in _by_clients(results, "times_"):
        rounds = _rounds_us(cpu_times[clients], tokens)
        for graph in sorted(figures.keys() - {"without"}, key=_place):
            coordinator = cpu_times[clients][f"coordinator-{graph}"]
            ratios = [figures[graph][key] / figures["without"][key] for key in ("ttft_s", "requests_per_s")]
            cells = [f"{ratio:.2f}" for ratio in (*ratios, rounds[graph] / rounds["without"])]
            cells += [f"{coordinator['token_us']:.1f} us", f"{coordinator['round_us']:,.0f} us"]
            rows.append([f"{clients} client(s): {_title(graph)}", *cells])
    columns = ["", "TTFT", "requests/s", f"CPU of all processes in rounds of {tokens} tokens"]
    return markdown_table.table([*columns, "coordinator per token", "per round besides its tokens"], rows)


def _rounds_us(figures: Mapping[str, Mapping[str, float]], tokens: int) -> dict[str, float]:
    """CPU time of a round in all processes of each graph."""
    rounds: dict[str, float] = {}
    for process, each in figures.items():
        graph = process.partition("-")[2]
        rounds[graph] = rounds.get(graph, 0.0) + each["round_us"] + tokens * each["token_us"]
    return rounds


def _by_clients(results: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    return ((name.removeprefix(prefix), figures) for name, figures in results.items() if name.startswith(prefix))


def _times(figures: Mapping[str, float]) -> list[str]:
    return [f"{1e3 * figures[key]:.2f} ms" for key in ("ttft_s", "total_s")] + [f"{figures['requests_per_s']:.0f}"]
