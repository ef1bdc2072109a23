"""Time of one pick of the `ampd` ordering policy, prefill estimates included, over queues as they occur.

    python benchmarks/reorder_time.py [--json] [--window 3 --window 32] [--queues 2000]

For every window and kind of queue: median and 99th percentile over fresh queues in microseconds (one cold pick each),
the share of picks that leave arrival order, and the median as a ratio to sorting the same queue by due time, measured
in turn with it.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import load_performance_model
from ampd.policies.base import OrderingSituation, Run
from ampd.policies.ordering.ampd import AmpdOrdering
from ampd.types import Parallelism, PrefillTask, Slo

TP4 = Parallelism(4)
NOW_S = 1000.0
Load = Callable[[random.Random, float], tuple[float, float]]
"""From an rng and the time that the tasks of the window take in total: (waited, TTFT target) of one task."""


def unloaded(rng: random.Random, total_s: float) -> tuple[float, float]:
    """All tasks have time enough."""
    return rng.uniform(0, 0.2), total_s * rng.uniform(1.5, 3)


def loaded(rng: random.Random, total_s: float) -> tuple[float, float]:
    """The same target for all tasks. Some of them cannot meet it."""
    return rng.uniform(0, 0.6) * total_s, total_s


def overloaded(rng: random.Random, total_s: float) -> tuple[float, float]:
    """One target for all; most are late and many have no chance any more."""
    return rng.uniform(0, 1.2) * total_s, 0.6 * total_s


def mixed(rng: random.Random, total_s: float) -> tuple[float, float]:
    """Every task with a target of its own."""
    return rng.uniform(0, 0.5) * total_s, rng.uniform(0.05, 1.5) * total_s


LOADS: tuple[Load, ...] = (unloaded, loaded, overloaded, mixed)


def make_queue(rng: random.Random, length: int, load: Load, model: PiecewiseModel) -> list[PrefillTask]:
    """Rounds of agents: increments of tens to thousands of tokens behind histories of up to 30,000."""
    sizes = [
        (rng.choice((0, int(rng.uniform(500, 30000)))), max(16, int(rng.lognormvariate(6, 1.1)))) for _ in range(length)
    ]
    total_s = sum(model.prefill_s(hist, incr, TP4) for hist, incr in sizes)
    waits = sorted((load(rng, total_s) for _ in sizes), reverse=True)
    return [
        PrefillTask(f"t{i}", f"s{i}", hist, incr, NOW_S - waited_s, Slo(ttft_s, 0.05))
        for i, ((hist, incr), (waited_s, ttft_s)) in enumerate(zip(sizes, waits, strict=True))
    ]


def measure(window: int, load: Load, queues: int, seed: int) -> dict[str, Any]:
    """Figures of one window and kind of queue."""
    model, rng = load_performance_model("qwen3-32b-h20"), random.Random(seed)
    policy, clock = AmpdOrdering(window=window), time.perf_counter_ns
    picks_us, sorts_us, moved = [], [], 0
    for _ in range(queues):
        queue = make_queue(rng, window, load, model)
        start = clock()
        pick = policy.pick(OrderingSituation(queue=queue, parallelism=TP4, model=model, now_s=NOW_S, rng=rng))
        picked = clock()
        sorted(queue, key=lambda task: task.arrival_s + task.slo.ttft_s)
        sorts_us.append((clock() - picked) / 1e3)
        picks_us.append((picked - start) / 1e3)
        moved += isinstance(pick, Run) and pick.index > 0
    p50_us = statistics.median(picks_us)
    return {
        "window": window,
        "queue": load.__name__,
        "p50_us": round(p50_us, 2),
        "p99_us": round(statistics.quantiles(picks_us, n=100)[98], 2),
        "ratio_to_sort": round(p50_us / statistics.median(sorts_us), 2),
        "reordered": round(moved / queues, 3),
    }


def main() -> None:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--window", type=int, action="append", help="window of the policy; default: 3 and 32")
    parser.add_argument("--queues", type=int, default=2000, help="fresh queues per kind")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    gc.disable()
    windows = arguments.window or [3, 32]
    measure(max(windows), mixed, 200, arguments.seed)  # warms the interpreter up
    results = [measure(w, load, arguments.queues, arguments.seed) for w in windows for load in LOADS]
    if arguments.json:
        print(json.dumps({"benchmark": "reorder_time", "python": sys.version.split()[0], "results": results}))
        return
    print(f"{'window':>6} {'queue':<11} {'p50 us':>8} {'p99 us':>8} {'x sort':>7} {'reordered':>9}")
    for row in results:
        print("{window:>6} {queue:<11} {p50_us:>8} {p99_us:>8} {ratio_to_sort:>7} {reordered:>9.0%}".format(**row))


if __name__ == "__main__":
    main()
