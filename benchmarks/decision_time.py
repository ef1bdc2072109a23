"""Time of one routing decision, for every routing policy, by the number of workers and the length of their queues.

    python -m benchmarks.decision_time [--json | --markdown] [--workers 8 --workers 64] [--queue 8 --queue 64]
                                       [--decisions 400] [--policy NAME] [--clock cpu]

The default is the grid of 8, 64 and 256 prefill workers with 8, 32 and 64 prefills each, because admission lets no more
than some tens wait. A decision reads the local copy of the shared state and asks the policy. The local copy gets what a
live one gets: publications, and between two decisions a prefill that enters and one that ends. `change us` is the time
of such a pair.

Every decision has a fresh task, every hundredth a fresh cluster. `ampd` is measured on each of its three ways out;
`ampd/cheapest` is the dearest of all: every worker is full, so it estimates every route. The others decide among queues
as they are under load: half to one and a half times `--queue` prefills that have waited up to a TTFT target each, and a
decode batch of up to 100 sequences. `reasons` says how often each way out was taken.

Three more decisions are measured with the policies `predictive`, also under load. `bind` chooses the owner of a new
session, among decode workers. `mixed` routes a round where all workers are mixed, and one of them owns the session.
`plan` routes a round where half of the workers own sessions and the session's owner has no memory left. So the session
would move, and new owners with room are tried.

`--clock cpu` counts the thread's CPU time, for machines that do something else meanwhile.

`ratio` compares medians with a plain `min` over the same workers' windowed TTFT, measured in turn with the decisions.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ampd.types import WorkerView
from benchmarks import markdown_table
from benchmarks.circumstances import circumstances, in_words
from benchmarks.decision_cases import Case, Cluster, cases, decision, make_task

CLOCKS = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}
DECISIONS_PER_CLUSTER = 100


def measure(
    case: Case,
    count: int,
    queue: int,
    decisions: int,
    seed: int,
    clock: Callable[[], int],
) -> dict[str, Any]:
    """Figures of one case."""
    rng = random.Random(seed)
    decide = decision(case, rng)
    decided_us: list[float] = []
    plain_us: list[float] = []
    changed_us: list[float] = []
    reasons: Counter[str] = Counter()
    mean_s: Callable[[WorkerView], float] = lambda worker: worker.ttft.mean_s  # noqa: E731
    for number in range(decisions):
        if number % DECISIONS_PER_CLUSTER == 0:
            cluster = Cluster(rng, case, count, queue)
            cluster.view.workers()
        task = make_task(rng)
        start = clock()
        worker_id, reason = decide(cluster, task)
        decided = clock()
        workers = cluster.view.prefill() or cluster.view.decode()
        begun = clock()
        min(workers, key=mean_s)
        compared = clock()
        cluster.change(worker_id, task)
        changed_us.append((clock() - compared) / 1e3)
        plain_us.append((compared - begun) / 1e3)
        decided_us.append((decided - start) / 1e3)
        reasons[reason] += 1
    if "/" in case.label and set(reasons) != {case.label.rpartition("/")[2]}:
        raise SystemExit(f"{case.label}: measured another way out than it says: {sorted(reasons)}")
    p50_us = statistics.median(decided_us)
    return {
        "policy": case.label,
        "workers": count,
        "queue": queue,
        "p50_us": round(p50_us, 1),
        "p99_us": round(statistics.quantiles(decided_us, n=100)[98], 1),
        "ratio": round(p50_us / statistics.median(plain_us), 1),
        "change_us": round(statistics.median(changed_us), 1),
        "reasons": dict(reasons.most_common()),
    }


def _measured(arguments: argparse.Namespace) -> Sequence[dict[str, Any]]:
    results = []
    for count in arguments.workers or [8, 64, 256]:
        for queue in arguments.queue or [8, 32, 64]:
            for case in cases():
                if arguments.policy and case.name not in arguments.policy:
                    continue
                clock = CLOCKS[arguments.clock]
                results.append(measure(case, count, queue, arguments.decisions, arguments.seed, clock))
                gc.collect()
    return results


def grid(results: Sequence[dict[str, Any]]) -> str:
    """P50 / P99 in us by policy, by the length of the queues and by the number of workers, as a table."""
    counts = sorted({row["workers"] for row in results})
    times = {
        (row["policy"], row["queue"], row["workers"]): f"{row['p50_us']:.0f} / {row['p99_us']:.0f}" for row in results
    }
    rows = dict.fromkeys((row["policy"], row["queue"]) for row in results)
    return markdown_table.table(
        ["policy", "prefills at each worker", *(f"{count:,} prefill workers" for count in counts)],
        [[f"`{policy}`", queue, *(times[policy, queue, count] for count in counts)] for policy, queue in rows],
    )


def main() -> None:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--markdown", action="store_true", help="print P50 and P99 in us by queues and workers")
    parser.add_argument("--workers", type=int, action="append", help="prefill workers; default: 8, 64 and 256")
    parser.add_argument("--queue", type=int, action="append", help="prefills each; default: 8, 32 and 64")
    parser.add_argument("--decisions", type=int, default=400, help="decisions per case")
    parser.add_argument("--policy", action="append", help="measure only these; default: all")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what is counted; default: wall")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    gc.disable()
    now = circumstances()
    results = _measured(arguments)
    if arguments.markdown:
        print(f"{in_words(now)}; {arguments.clock} time\n\n{grid(results)}")
        return
    if arguments.json:
        head = {"benchmark": "decision_time", **now, "python": sys.version.split()[0], "clock": arguments.clock}
        print(json.dumps({**head, "results": results}))
        return
    print(f"{'policy':<16} {'workers':>7} {'queue':>5} {'p50 us':>9} {'p99 us':>9} {'x min':>7} {'change us':>9}")
    for row in results:
        print("{policy:<16} {workers:>7} {queue:>5} {p50_us:>9} {p99_us:>9} {ratio:>7} {change_us:>9}".format(**row))


if __name__ == "__main__":
    main()
