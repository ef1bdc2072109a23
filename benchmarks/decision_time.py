"""Time of one routing decision at 8, 64 and 256 prefill workers, for every routing policy.

    python benchmarks/decision_time.py [--json] [--workers 8 --workers 64] [--queue 8] [--decisions 2000]
                                       [--policy NAME] [--clock cpu]

Every decision has a fresh task, every tenth a fresh cluster. `ampd` is measured on each of its three ways out;
`ampd/cheapest` is the dearest of all: every worker is full, so it estimates every route and sums up every queue.
The others decide among queues as they are under load: 0 to twice `--queue` prefills that have waited up to a TTFT
target each, and a decode batch of up to 100 sequences. `reasons` says how often each way out was taken.

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
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ampd.perf.piecewise import load_performance_model
from ampd.policies.base import RoutingSituation
from ampd.policies.registry import ROUTING
from ampd.types import Parallelism, PrefillTask, Role, Slo, Window, WorkerView

MODEL = load_performance_model("qwen3-32b-h20")
SLO = Slo(ttft_s=1.0, itl_s=0.04)
CLOCKS = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}
FREE, FULL = Window(0.01, 20), Window(50.0, 20)


def make_task(rng: random.Random) -> PrefillTask:
    """A later round of an agent."""
    number = rng.randrange(1 << 30)
    hist, incr = rng.randint(500, 30000), max(16, int(rng.lognormvariate(6, 1.1)))
    return PrefillTask(f"t{number}", f"s{number % 100}", hist, incr, 0.0, SLO)


def make_workers(rng: random.Random, count: int, queue: int, ttft: Window) -> list[WorkerView]:
    """Prefill workers of two parallelisms with `queue` waiting prefills each, a tenth of the sessions held."""
    return [
        WorkerView(
            f"{rng.getrandbits(64):016x}",
            Role.PREFILL,
            Parallelism(rng.choice((2, 4))),
            tuple(make_task(rng) for _ in range(queue)),
            ttft=replace(ttft, mean_s=ttft.mean_s * rng.uniform(0.9, 1.1)),
            max_context_tokens=131072,
            held_tokens={f"s{rng.randrange(100)}": 4000 for _ in range(10)},
        )
        for _ in range(count)
    ]


def under_load(rng: random.Random, worker: WorkerView, queue: int, batch: int = 0) -> WorkerView:
    """The worker with a queue of a length between 0 and twice `queue`, and a decode batch of up to `batch`."""
    tasks = [
        replace(make_task(rng), arrival_s=-rng.uniform(0, SLO.ttft_s), session_missed=rng.random() < 0.2)
        for _ in range(rng.randint(0, 2 * queue))
    ]
    decoding = rng.randint(0, batch)
    return replace(worker, queue=tuple(tasks), decode_batch=decoding, decode_context_tokens=8000 * decoding)


def cases() -> list[tuple[str, str, Window, Window]]:
    """(label, policy, TTFT window of the prefill workers, ITL window of the decode worker)."""
    ways_out = {"ttft-slack": (FREE, FULL), "itl-slack": (FULL, Window(0.001, 20)), "cheapest": (FULL, FULL)}
    result = [(f"ampd/{reason}", "ampd", *windows) for reason, windows in ways_out.items()]
    return result + [(name, name, FULL, FULL) for name in ROUTING.names() if name != "ampd"]


def measure(
    case: tuple[str, str, Window, Window], count: int, queue: int, decisions: int, seed: int, clock: Callable[[], int]
) -> dict[str, Any]:
    """Figures of one case."""
    label, policy_name, ttft, itl = case
    is_way_out = "/" in label
    rng, policy = random.Random(seed), ROUTING.create(policy_name)
    decided_us: list[float] = []
    plain_us: list[float] = []
    reasons: Counter[str] = Counter()
    mean_s: Callable[[WorkerView], float] = lambda worker: worker.ttft.mean_s  # noqa: E731
    for number in range(decisions):
        if number % 10 == 0:
            workers = make_workers(rng, count, queue, ttft)
            decode = replace(make_workers(rng, 1, queue, ttft)[0], role=Role.DECODE, itl=itl)
            if not is_way_out:
                workers = [under_load(rng, worker, queue) for worker in workers]
                decode = under_load(rng, replace(decode, itl=Window()), queue, batch=100)
        task = make_task(rng)
        start = clock()
        decision = policy.route(
            RoutingSituation(task=task, decode=decode, prefill=workers, model=MODEL, now_s=0.0, rng=rng)
        )
        decided = clock()
        min(workers, key=mean_s)
        plain_us.append((clock() - decided) / 1e3)
        decided_us.append((decided - start) / 1e3)
        reasons[decision.reason] += 1
    if is_way_out and set(reasons) != {label.rpartition("/")[2]}:
        raise SystemExit(f"{label}: measured another way out than it says: {sorted(reasons)}")
    p50_us = statistics.median(decided_us)
    return {
        "policy": label,
        "workers": count,
        "queue": queue,
        "p50_us": round(p50_us, 1),
        "p99_us": round(statistics.quantiles(decided_us, n=100)[98], 1),
        "ratio": round(p50_us / statistics.median(plain_us), 1),
        "reasons": dict(reasons.most_common()),
    }


def main() -> None:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--workers", type=int, action="append", help="prefill workers; default: 8, 64 and 256")
    parser.add_argument("--queue", type=int, default=8, help="prefills that wait at every worker")
    parser.add_argument("--decisions", type=int, default=2000, help="decisions per case")
    parser.add_argument("--policy", action="append", help="measure only these; default: all")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what is counted; default: wall")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    gc.disable()
    counts = arguments.workers or [8, 64, 256]
    results = []
    for count in counts:
        for case in cases():
            if arguments.policy and case[1] not in arguments.policy:
                continue
            results.append(
                measure(case, count, arguments.queue, arguments.decisions, arguments.seed, CLOCKS[arguments.clock])
            )
            gc.collect()
    if arguments.json:
        head = {"benchmark": "decision_time", "python": sys.version.split()[0], "clock": arguments.clock}
        print(json.dumps({**head, "results": results}))
        return
    print(f"{'policy':<16} {'workers':>7} {'queue':>5} {'p50 us':>8} {'p99 us':>8} {'x min':>7}")
    for row in results:
        print("{policy:<16} {workers:>7} {queue:>5} {p50_us:>8} {p99_us:>8} {ratio:>7}".format(**row))


if __name__ == "__main__":
    main()
