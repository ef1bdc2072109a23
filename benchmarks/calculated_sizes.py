"""What whole graphs need, calculated from what their parts cost. No such graph was run.

    python -m benchmarks.scaling --json > scaling.json
    python -m benchmarks.coordinator_overhead --step-ms 20 --concurrency 32 --requests 64 --long-tokens 300 \\
        --bursts 3 --stream-tokens 1 4 16 --status-relay --json > tokens.json
    python -m benchmarks.decision_time --policy predictive --clock cpu --workers 16 --workers 64 --workers 250 \\
        --workers 1000 --queue 8 --json > decisions.json
    python -m benchmarks.calculated_sizes scaling.json tokens.json decisions.json

It prints the tables of benchmarks/results/scaling.md: those of the three measurements, and the calculated one. Each
session has a round per minute with 200 output tokens. A quarter of the workers are prefill workers, and a decision
estimates the route over each of them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import decision_time, markdown_table, overhead_tables, scaling
from benchmarks.circumstances import in_words
from benchmarks.overhead_tables import RELAY, STATUS

SIZES = ((64, 10_000), (256, 25_000), (1000, 100_000))
"""(workers, sessions)."""

ROUNDS_PER_S = 1 / 60
"""Of a session."""
ROUND_TOKENS = 200
"""Output tokens of a round."""
PUBLICATIONS_PER_ROUND, PUBLICATIONS_PER_S = 1.78, 2.9
"""Of a decode worker: the line through 3.1 publications per round at 2.2 rounds/s, and 5.7 at 0.74 rounds/s."""


class Work(NamedTuple):
    """CPU times of a process, in us: of a round besides its tokens, and of each token."""

    round_us: float
    token_us: float

    def cores(self, rounds_per_s: float, tokens_per_s: float) -> float:
        """The cores that such processes need together."""
        return (rounds_per_s * self.round_us + tokens_per_s * self.token_us) / 1e6


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU times in us of what happens in a graph.

    Attributes:
        coordinator: where workers send each token alone.
        grouped_coordinator: with `--stream-tokens 4`.
        frontend, relay: of each token alone. A status relay is a process with one core, and has one frontend.
        decision_us: of a coordinator, over all prefill workers. The time per round was measured without any.
        route_us, publish_us, passed_on_us: of Redis, per round, per publication, and per coordinator that gets one.
        applied_us: of each coordinator, for each publication.
    """

    coordinator: Work
    grouped_coordinator: Work
    frontend: Work
    relay: Work
    decision_us: float
    route_us: float
    publish_us: float
    passed_on_us: float
    applied_us: float


@dataclass(frozen=True, slots=True)
class Needs:
    """What a graph needs, in cores where nothing else is said.

    Attributes:
        following: share of each coordinator's core for the publications of all workers.
        deciding: of all coordinators together, for decisions.
        coordinators, grouped_coordinators: how many, without and with `--stream-tokens 4`; None: no number is enough.
        shares: of the time of all coordinators without `--stream-tokens`, by kind of work. Empty: no number is enough.
    """

    rounds_per_s: float
    tokens_per_s: float
    following: float
    deciding: float
    coordinators: int | None
    grouped_coordinators: int | None
    frontends: float
    relays: float
    redis: float
    redis_per_coordinator: float
    shares: Mapping[str, float]


def needs(workers: int, sessions: int, costs: Costs) -> Needs:
    """What a graph of this size needs. A coordinator's core does its share of the rounds, and follows all workers."""
    rounds_per_s = sessions * ROUNDS_PER_S
    tokens_per_s = rounds_per_s * ROUND_TOKENS
    decode = workers - scaling.prefill_workers(workers)
    publications_per_s = PUBLICATIONS_PER_ROUND * rounds_per_s + PUBLICATIONS_PER_S * decode
    following = publications_per_s * costs.applied_us / 1e6
    deciding = rounds_per_s * costs.decision_us / 1e6

    def coordinators(work: Work) -> int | None:
        shared = deciding + work.cores(rounds_per_s, tokens_per_s)
        return math.ceil(shared / (1 - following)) if following < 1 else None

    count = coordinators(costs.coordinator)
    times = {
        "tokens": costs.coordinator.cores(0.0, tokens_per_s),
        "rounds": costs.coordinator.cores(rounds_per_s, 0.0),
        "decisions": deciding,
        "following": following * (count or 0),
    }
    return Needs(
        rounds_per_s,
        tokens_per_s,
        following,
        deciding,
        count,
        coordinators(costs.grouped_coordinator),
        costs.frontend.cores(rounds_per_s, tokens_per_s),
        costs.relay.cores(rounds_per_s, tokens_per_s),
        (rounds_per_s * costs.route_us + publications_per_s * costs.publish_us) / 1e6,
        publications_per_s * costs.passed_on_us / 1e6,
        {name: time_s / sum(times.values()) for name, time_s in times.items()} if count else {},
    )


def costs_of(
    workers: int, sessions: int, measured: Mapping[str, Any], tokens: Mapping[str, Any], decisions: Mapping[str, Any]
) -> Costs:
    """The costs for this size from what the three benchmarks print with `--json`.

    Raises:
        KeyError: a benchmark was run without this size, or without the flags above.
    """
    size = _only(measured["sizes"], workers=workers, sessions=sessions)
    decision = _only(decisions["results"], policy="predictive", workers=scaling.prefill_workers(workers))
    of = next(figures for name, figures in tokens.items() if name.startswith("concurrency_"))

    def work(process: str) -> Work:
        return Work(of[process]["round_us"], of[process]["token_us"])

    return Costs(
        work("coordinator-with"),
        work("coordinator-with-4"),
        work("frontend-with"),
        work(f"{RELAY}-{STATUS}"),
        decision["p50_us"],
        size["route"]["redis_us"],
        size["publish"]["redis_us"],
        size["to_one_us"],
        size["applied_us"],
    )


def _only(rows: list[dict[str, Any]], **wanted: object) -> dict[str, Any]:
    """The row that has these values."""
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            return row
    raise KeyError(", ".join(f"{name} {value}" for name, value in wanted.items()))


_COLUMNS = (
    "workers",
    "sessions",
    "rounds/s",
    "tokens/s",
    "coordinators",
    "with `--stream-tokens 4`",
    "following the workers, of each coordinator's core",
    "decisions, cores of all coordinators",
    "cores of the frontends",
    "cores of the status relays",
    "Redis, of one core",
)


def row(workers: int, sessions: int, graph: Needs) -> str:
    """A size as a line of the table."""
    counts = ["-" if count is None else str(count) for count in (graph.coordinators, graph.grouped_coordinators)]
    redis = f"{graph.redis:.2f}, and {graph.redis_per_coordinator:.3f} per coordinator"
    cells = [f"{workers:,}", f"{sessions:,}", f"{graph.rounds_per_s:,.0f}", f"{graph.tokens_per_s:,.0f}", *counts]
    cells += [f"{graph.following:.2f}", f"{graph.deciding:.2f}", f"{graph.frontends:.1f}", f"{graph.relays:.1f}", redis]
    return markdown_table.row(cells)


def tables(measured: Mapping[str, Any], tokens: Mapping[str, Any], decisions: Mapping[str, Any]) -> Iterator[str]:
    """All tables of the page, each behind the circumstances of its measurement."""
    for name, document, text in (
        ("Rounds and tokens", tokens, overhead_tables.cpu(tokens)),
        ("Redis and the copies of the workers", measured, scaling.table(measured["sizes"])),
        ("Decisions", decisions, decision_time.grid(decisions["results"])),
    ):
        yield f"{name}: {in_words(document)}\n\n{text}\n"
    graphs = {size: needs(*size, costs_of(*size, measured, tokens, decisions)) for size in SIZES}
    rows = [row(*size, graph) for size, graph in graphs.items()]
    yield "Calculated\n\n" + "\n".join([markdown_table.head(_COLUMNS), *rows]) + "\n"
    yield "The coordinators' time\n\n" + "\n".join(
        f"{workers} workers: " + ", ".join(f"{name} {share:.1%}" for name, share in graph.shares.items())
        for (workers, _), graph in graphs.items()
        if graph.shares
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("scaling", "tokens", "decisions"):
        parser.add_argument(name, type=Path, help=f"output of the benchmark of {name} with --json")
    options = parser.parse_args()
    documents = [json.loads(path.read_text()) for path in (options.scaling, options.tokens, options.decisions)]
    try:
        print("\n".join(tables(*documents)))
    except KeyError as error:
        print(f"a figure is missing, because a benchmark was run with other flags: {error.args[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
