"""Time of one routing decision, for every routing policy, by the number of workers and the length of their queues.

    python -m benchmarks.decision_time [--json | --markdown] [--workers 8 --workers 64] [--queue 8 --queue 512]
                                       [--whole] [--decisions 400] [--policy NAME] [--clock cpu]

The default is the grid of 8, 64 and 256 prefill workers with 8, 64, 256 and 512 prefills each. A decision reads the
local copy of the shared state and asks the policy. The local copy gets what a live one gets: publications that list 128
prefills and the sums of the others, and between two decisions a prefill that enters and one that ends. `change us` is
the time of such a pair. `--whole`: publications list whole queues, as a simulator's views do.

Every decision has a fresh task, every hundredth a fresh cluster. `ampd` is measured on each of its three ways out;
`ampd/cheapest` is the dearest of all: every worker is full, so it estimates every route. The others decide among queues
as they are under load: half to one and a half times `--queue` prefills that have waited up to a TTFT target each, and a
decode batch of up to 100 sequences. `reasons` says how often each way out was taken.

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
from dataclasses import replace
from typing import Any, cast

from ampd.perf.piecewise import load_performance_model
from ampd.policies.base import RoutingSituation
from ampd.policies.registry import ROUTING
from ampd.state.store import StateStore, TaskDone, TaskQueued, WorkerUpdated
from ampd.state.view import ClusterView
from ampd.types import Parallelism, PrefillTask, Role, Slo, Window, WorkerView
from benchmarks import markdown_table
from benchmarks.circumstances import circumstances, in_words
from workers.worker_view import listed

MODEL = load_performance_model("qwen3-32b-h20")
SLO = Slo(ttft_s=1.0, itl_s=0.04)
CLOCKS = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}
FREE, FULL = Window(0.01, 20), Window(50.0, 20)
DECISIONS_PER_CLUSTER = 100


class _NoStore:
    """The local copy is not connected here. It only asks how long ago a command was refused."""

    def refused_ago_s(self) -> float:
        return float("inf")


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
    """The worker with a queue of half to one and a half times `queue`, and a decode batch of up to `batch`."""
    tasks = [
        replace(make_task(rng), arrival_s=-rng.uniform(0, SLO.ttft_s), session_missed=rng.random() < 0.2)
        for _ in range(rng.randint(queue // 2, queue + queue // 2))
    ]
    decoding = rng.randint(0, batch)
    return replace(worker, queue=tuple(tasks), decode_batch=decoding, decode_context_tokens=8000 * decoding)


def cases() -> list[tuple[str, str, Window, Window]]:
    """(label, policy, TTFT window of the prefill workers, ITL window of the decode worker)."""
    ways_out = {"ttft-slack": (FREE, FULL), "itl-slack": (FULL, Window(0.001, 20)), "cheapest": (FULL, FULL)}
    result = [(f"ampd/{reason}", "ampd", *windows) for reason, windows in ways_out.items()]
    return result + [(name, name, FULL, FULL) for name in ROUTING.names() if name != "ampd"]


class Cluster:
    """Workers as a coordinator's local copy has them, with queues that change and keep their length."""

    def __init__(
        self, rng: random.Random, case: tuple[str, str, Window, Window], count: int, queue: int, is_whole: bool
    ) -> None:
        label, _, ttft, itl = case
        self._rng = rng
        workers = make_workers(rng, count, queue, ttft)
        decode = replace(make_workers(rng, 1, queue, ttft)[0], role=Role.DECODE, itl=itl)
        if "/" not in label:
            workers = [under_load(rng, worker, queue) for worker in workers]
            decode = under_load(rng, replace(decode, itl=Window()), queue, batch=100)
        self.decode_id = decode.worker_id
        self.view = ClusterView(cast(StateStore, _NoStore()), lease_s=1e9, clock=lambda: 0.0, model=MODEL)
        self._there: dict[str, list[str]] = {}
        for worker in (*workers, decode):
            tasks, rest = (worker.queue, worker.queue_rest) if is_whole else listed(worker.queue)
            self.view.apply(WorkerUpdated(replace(worker, queue=tasks, queue_rest=rest), None))
            self._there[worker.worker_id] = [task.task_id for task in tasks]

    def change(self, worker_id: str, task: PrefillTask) -> None:
        """A prefill enters at a worker, and its first one ends."""
        there = self._there[worker_id]
        self.view.apply(TaskQueued(worker_id, task))
        there.append(task.task_id)
        self.view.apply(TaskDone(worker_id, there.pop(0)))


def measure(
    case: tuple[str, str, Window, Window],
    count: int,
    queue: int,
    is_whole: bool,
    decisions: int,
    seed: int,
    clock: Callable[[], int],
) -> dict[str, Any]:
    """Figures of one case."""
    label, policy_name, _, _ = case
    rng, policy = random.Random(seed), ROUTING.create(policy_name)
    decided_us: list[float] = []
    plain_us: list[float] = []
    changed_us: list[float] = []
    reasons: Counter[str] = Counter()
    mean_s: Callable[[WorkerView], float] = lambda worker: worker.ttft.mean_s  # noqa: E731
    for number in range(decisions):
        if number % DECISIONS_PER_CLUSTER == 0:
            cluster = Cluster(rng, case, count, queue, is_whole)
            cluster.view.prefill()
        task = make_task(rng)
        start = clock()
        workers, decode = cluster.view.prefill(), cluster.view.worker(cluster.decode_id)
        assert decode is not None
        decision = policy.route(
            RoutingSituation(task=task, decode=decode, prefill=workers, model=MODEL, now_s=0.0, rng=rng)
        )
        decided = clock()
        min(workers, key=mean_s)
        compared = clock()
        cluster.change(decision.worker_id, task)
        changed_us.append((clock() - compared) / 1e3)
        plain_us.append((compared - decided) / 1e3)
        decided_us.append((decided - start) / 1e3)
        reasons[decision.reason] += 1
    if "/" in label and set(reasons) != {label.rpartition("/")[2]}:
        raise SystemExit(f"{label}: measured another way out than it says: {sorted(reasons)}")
    p50_us = statistics.median(decided_us)
    return {
        "policy": label,
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
        for queue in arguments.queue or [8, 64, 256, 512]:
            for case in cases():
                if arguments.policy and case[1] not in arguments.policy:
                    continue
                clock = CLOCKS[arguments.clock]
                results.append(measure(case, count, queue, arguments.whole, arguments.decisions, arguments.seed, clock))
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
    parser.add_argument("--queue", type=int, action="append", help="prefills each; default: 8, 64, 256 and 512")
    parser.add_argument("--whole", action="store_true", help="views list whole queues, and not the first 128 prefills")
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
        print(json.dumps({**head, "whole": arguments.whole, "results": results}))
        return
    print(f"{'policy':<16} {'workers':>7} {'queue':>5} {'p50 us':>9} {'p99 us':>9} {'x min':>7} {'change us':>9}")
    for row in results:
        print("{policy:<16} {workers:>7} {queue:>5} {p50_us:>9} {p99_us:>9} {ratio:>7} {change_us:>9}".format(**row))


if __name__ == "__main__":
    main()
