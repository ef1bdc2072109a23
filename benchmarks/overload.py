"""A live graph of modelled engines at one, two and ten times the load that it can serve.

    python -m benchmarks.overload [--minutes 10] [--loads 1,2,10] [--rate SESSIONS_PER_S] [--simulated] [--json]

Sessions arrive at random (Poisson). Half of the clients wait as long as `Retry-After` of a refusal asks them to, the
others come back after 2 s whatever it says. One in ten closes its connection when a round takes too long. Rounds are
chat completions; half of the clients get them as streams. The load of 1x is the rate at which the simulator predicts
that 90 % of the rounds meet their targets.

Printed for each load: goodput (rounds within both targets per second), the P99 TTFT of accepted rounds, requests that
were refused and how many of them had `Retry-After`, other statuses than 200, bytes that the graph wrote to Redis, the
longest and the P99 answer time of `/metrics` (it is answered on the event loop of the process), the longest queue of a
worker, its largest published view, the most memory of each kind of process with the limit of its manifest, and lost
leases. The JSON has the CPU time of each kind of process, too.

With `--simulated` the same sessions are served in virtual time, by the same decisions. Nothing there needs a core, so
that the difference to the live graph is what the machine costs. All refused clients come back when they are asked to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from ampd.cli.serve.graph import TARGETS_FILE
from ampd.cli.serve.settings import TINY
from ampd.perf.presets import load_performance_model
from ampd.policies import defaults
from ampd.policies.registry import create_named
from ampd.state.embedded import EmbeddedRedis
from ampd.telemetry.metrics import names
from ampd.types import Parallelism, Slo
from ampd.wire import OVERLOADED
from benchmarks import plain_http
from benchmarks.circumstances import circumstances
from benchmarks.graph_processes import CONTAINER_OF, cpu_s, memory_bytes, memory_limits
from planner.simulator.options import Cluster, Policies, ReplicaGroup, SimulationOptions
from planner.simulator.outcome import SimulationRun
from planner.simulator.simulate import simulate
from tools.demo import running_graph
from workloads.results import meets
from workloads.trace import Round, Session

PREFILL_S_PER_TOKEN, STEP_S = 8e-3, 0.1
SLO = Slo(ttft_s=8.0, itl_s=1.0)
ROUNDS = 4
FIRST_TOKENS, NEXT_TOKENS, OUTPUT_TOKENS, TOOL_S = 200, 100, 8, 2.0
ATTEMPTS = 10
MAX_WAIT = 4.0
IMPATIENT_S = 2.0
LEAVES_S = 2.0 * SLO.ttft_s
_BROKEN = 0
"""Instead of the status of a stream that began with 200, and then failed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; prints a Markdown table, or with `--json` one object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of arrivals at each load")
    parser.add_argument("--loads", default="1,2,10", help="multiples of the rate, comma-separated")
    parser.add_argument("--rate", type=float, help="sessions per second at 1x; default: as the simulator predicts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--simulated", action="store_true", help="print the goodput of a simulation, without a graph")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(argv)
    now = circumstances()
    with tempfile.TemporaryDirectory(prefix="ampd-overload-") as name, EmbeddedRedis() as redis:
        profile = Path(name) / "profile.json"
        profile.write_text(json.dumps(performance_model()), encoding="utf-8")
        rate = options.rate or predicted_capacity(str(profile))
        _say(f"1x is {rate:.2f} sessions of {ROUNDS} rounds per second")
        if options.simulated:
            for load in map(float, options.loads.split(",")):
                print(f"{load:g}x: {simulated_goodput(str(profile), load * rate, options):.2f} rounds/s in time")
            return 0
        flags = [
            "--engine",
            "modelled",
            "--port",
            "0",
            "--perf",
            str(profile),
            "--prefill",
            "1",
            "--decode",
            "1",
            "--pools",
            "static",
        ]
        flags += ["--ttft", str(SLO.ttft_s), "--itl", str(SLO.itl_s), "--log-dir", name, "--state-url", redis.url]
        with running_graph(flags, _say) as url:
            loads = [float(load) for load in options.loads.split(",")]
            results = asyncio.run(_loads(url, Path(name), redis.url, loads, rate, options))
    print(json.dumps({**now, "rate": rate, "results": results}, indent=1) if options.json else table(results))
    return 0


def performance_model() -> dict[str, Any]:
    """Engines so slow that ten times their load leaves most of two cores idle: 8 ms per token of prefill.

    A faster engine would need more requests per second for the same queues. Then the cores, which the clients and the
    modelled engines share with the graph, would be what is overloaded.
    """
    steps = {"from_batch": 0, "alpha_s": STEP_S, "beta_s_per_sequence": 0.004}
    prefill = {
        "from_incr_tokens": 0,
        "alpha_s": 0.04,
        "beta_s_per_token": PREFILL_S_PER_TOKEN,
        "gamma_s_per_token2": 0,
    }
    worker = {
        "tp": 1,
        "prefill": {"history_s_per_token": 0, "segments": [prefill]},
        "decode": {"context_s_per_token": 0, "segments": [steps]},
    }
    transfer = {
        "tp_source": 1,
        "tp_target": 1,
        "segments": [{"from_tokens": 0, "alpha_s": 0.001, "beta_s_per_token": 0}],
    }
    provenance = {"kind": "rough", "source": "overload", "model": "none", "gpu": "none"}
    return {
        "format": "ampd-performance-model/1",
        "provenance": {**provenance, "date": "2026-01-01", "method": "made up"},
        "workers": [worker],
        "kv_transfers": [transfer],
        "kv_bytes_per_token": 64,
    }


def predicted_capacity(profile: str) -> float:
    """Sessions per second of which 90 % of the rounds meet their targets, by simulation."""

    def attains(rate: float) -> bool:
        sessions = list(islice(_arrivals(rate, 0), 300))
        return _simulated(profile, sessions, SimulationOptions()).attainment(SLO).rounds >= 0.9

    low, high = 0.05, 2.0
    while high - low > 0.02 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if attains(middle) else (low, middle)
    return low


def simulated_goodput(profile: str, rate: float, options: argparse.Namespace) -> float:
    """Rounds per second that meet both targets and end while sessions arrive."""
    seconds: float = 60.0 * options.minutes
    sessions = list(takewhile(lambda session: session.arrival_s < seconds, _arrivals(rate, options.seed)))
    run = _simulated(profile, sessions, SimulationOptions(max_wait=MAX_WAIT))
    ended = [each for each in run.rounds if each.e2e_s is not None and each.sent_s + each.e2e_s < seconds]
    return sum(meets(each, SLO) for each in ended) / seconds


def _arrivals(rate: float, seed: int) -> Iterator[Session]:
    """Sessions as the clients send them, without an end."""
    first = Round(incr_tokens=FIRST_TOKENS, output_tokens=OUTPUT_TOKENS)
    later = Round(incr_tokens=NEXT_TOKENS, output_tokens=OUTPUT_TOKENS, tool_s=TOOL_S)
    rng, at_s = random.Random(seed), 0.0
    for number in count():
        at_s += rng.expovariate(rate)
        yield Session(session_id=str(number), arrival_s=at_s, rounds=(first, *[later] * (ROUNDS - 1)))


def _simulated(profile: str, sessions: list[Session], options: SimulationOptions) -> SimulationRun:
    model, group = load_performance_model(profile), ReplicaGroup(1, Parallelism(1), 0)
    policies = Policies(
        create_named("binding", defaults.BINDING),
        create_named("routing", defaults.ROUTING),
        create_named("ordering", defaults.ORDERING),
        create_named("slicing", defaults.SLICING),
    )
    return simulate(sessions, Cluster((group,), (group,)), model, policies, SLO, options)


@dataclass
class Seen:
    """What the clients of one load saw. Times are those of arrivals and answers since the load began."""

    ttft_s: list[float] = field(default_factory=list)
    good: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    named: int = 0
    left: int = 0
    given_up: int = 0
    late_s: float = 0.0


class Clients:
    """Clients of one graph. Other clients need another seed, because engines still have the KV of equal prompts."""

    def __init__(self, url: str, seed: str) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)
        self._seed = seed
        self._names = count()

    async def load(self, rate: float, seconds: float) -> Seen:
        """Sessions that arrive for `seconds`. Those that are not over then are broken off."""
        seen, tasks, rng = Seen(), [], random.Random(self._seed)
        begin_s = due_s = time.monotonic()
        while due_s < begin_s + seconds:
            await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
            seen.late_s = max(seen.late_s, time.monotonic() - due_s)
            tasks.append(asyncio.create_task(self._session(seen)))
            due_s += rng.expovariate(rate)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return seen

    async def _session(self, seen: Seen) -> None:
        name = f"s{self._seed}-{next(self._names)}"
        rng = random.Random(name)
        honours, streams = rng.random() < 0.5, rng.random() < 0.5
        limit_s = LEAVES_S if rng.random() < 0.1 else 600.0
        messages: list[dict[str, str]] = []
        for index in range(ROUNDS):
            letters = rng.choices("abcdefghij", k=NEXT_TOKENS if index else FIRST_TOKENS)
            messages.append({"role": "user", "content": "".join(letters)})
            body = {"model": TINY, "messages": messages, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
            body |= {"stream": streams, "nvext": {"extra_fields": ["engine_data"]}}
            try:
                async with asyncio.timeout(limit_s):
                    reply = await self._round(seen, name, body, honours)
            except TimeoutError:
                seen.left += 1
                return
            if reply is None:
                seen.given_up += 1
                return
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"] or ""})
            await asyncio.sleep(TOOL_S)

    async def _round(self, seen: Seen, name: str, body: dict[str, Any], honours: bool) -> dict[str, Any] | None:
        for _ in range(ATTEMPTS):
            began_s = time.monotonic()
            sent, headers = json.dumps(body).encode(), {"x-dynamo-session-id": name}
            answer = await plain_http.request(self._host, self._port, "POST", "/v1/chat/completions", sent, headers)
            reply = plain_http.chat_of(answer) if answer.status == 200 else None
            seen.statuses[_BROKEN if answer.status == 200 and reply is None else answer.status] += 1
            if answer.status == OVERLOADED:
                seen.named += answer.retry_after_s is not None
                asked_s = answer.retry_after_s if honours else None
                await asyncio.sleep(IMPATIENT_S if asked_s is None else asked_s)
                continue
            if reply is None:
                return None
            ttft_s: float = reply["nvext"]["engine_data"]["ampd"]["ttft_s"]
            itl_s = (time.monotonic() - began_s - ttft_s) / (OUTPUT_TOKENS - 1)
            seen.ttft_s.append(ttft_s)
            seen.good += ttft_s <= SLO.ttft_s and itl_s <= SLO.itl_s
            return reply
        return None


class Watch:
    """Samples the processes of the graph every second.

    Attributes:
        answer_s: seconds that `/metrics` of the coordinator and the workers took.
        most_bytes: kind of process -> the most memory of it, with others in the same container.
        most_queued: prefills in the queue of one worker.
        most_published: of one worker in Redis, bytes of its view and changes to its queue since.
    """

    def __init__(self, log_dir: Path, redis: Redis) -> None:
        targets = json.loads((log_dir / TARGETS_FILE).read_text(encoding="utf-8"))
        self._targets = {each["labels"]["process"]: each["targets"][0] for each in targets}
        self._redis = redis
        self.begin()

    def begin(self) -> None:
        """Forget what was seen."""
        self.answer_s: list[float] = []
        self.most_bytes: dict[str, int] = {}
        self.most_queued = 0.0
        self.most_published = {"view_bytes": 0, "queue_changes": 0}

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            await self.metrics()
            await self._published()
            self._memory()

    async def metrics(self) -> dict[str, float]:
        """Sums over the processes of the metrics that are of interest here."""
        totals = defaultdict[str, float](float)
        for process, target in self._targets.items():
            if process == "frontend":
                continue
            host, port = target.split(":")
            began_s = time.monotonic()
            answer = await plain_http.request(host, int(port), "GET", "/metrics")
            self.answer_s.append(time.monotonic() - began_s)
            for family in text_string_to_metric_families(answer.text.decode()):
                if family.name.startswith(names.PREFIX):
                    for sample in family.samples:
                        totals[sample.name] += sample.value
                        if sample.name == names.QUEUE_TASKS.name:
                            self.most_queued = max(self.most_queued, sample.value)
        return totals

    async def written_bytes(self) -> int:
        """Bytes that Redis has received."""
        return int((await self._redis.info("stats"))["total_net_input_bytes"])

    async def _published(self) -> None:
        most = self.most_published
        async for key in self._redis.scan_iter(b"*:worker:*"):
            most["view_bytes"] = max(most["view_bytes"], await self._redis.strlen(key))
        async for key in self._redis.scan_iter(b"*:queue:*"):
            most["queue_changes"] = max(most["queue_changes"], await self._redis.hlen(key))

    def _memory(self) -> None:
        used = memory_bytes()
        of_containers = Counter[str]()
        for kind, size in used.items():
            of_containers[CONTAINER_OF.get(kind, kind)] += size
        for kind, size in {**used, **of_containers}.items():
            self.most_bytes[kind] = max(self.most_bytes.get(kind, 0), size)


async def _loads(
    url: str, log_dir: Path, state_url: str, loads: Sequence[float], rate: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    redis = Redis.from_url(state_url)
    watch = Watch(log_dir, redis)
    results = []
    for load in loads:
        results.append(await _load(url, watch, load, rate, options))
        _say(json.dumps(results[-1]))
    await redis.aclose()
    return results


async def _load(url: str, watch: Watch, load: float, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    clients, seconds = Clients(url, f"{options.seed}-{load:g}"), 60.0 * options.minutes
    watch.begin()
    before, bytes_before, used_s = await watch.metrics(), await watch.written_bytes(), time.process_time()
    cpu_before_s = cpu_s()
    watching = asyncio.create_task(watch.run())
    seen = await clients.load(load * rate, seconds)
    used_s, cpu_after_s = time.process_time() - used_s, cpu_s()
    watching.cancel()
    after, bytes_after = await watch.metrics(), await watch.written_bytes()
    left = await _until_idle(watch)

    def added(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    refused = seen.statuses[OVERLOADED]
    return {
        "load": load,
        "sessions_per_s": load * rate,
        "minutes": options.minutes,
        "goodput_rounds_per_s": seen.good / seconds,
        "accepted": len(seen.ttft_s),
        "attainment": seen.good / max(len(seen.ttft_s), 1),
        "ttft_p50_s": _quantile(seen.ttft_s, 50),
        "ttft_p99_s": _quantile(seen.ttft_s, 99),
        "statuses": dict(seen.statuses),
        "refused_share": refused / max(seen.statuses.total(), 1),
        "refused_with_time": seen.named / refused if refused else None,
        "given_up": seen.given_up,
        "left": seen.left,
        "most_queued": watch.most_queued,
        "most_published": watch.most_published,
        "prefills_dropped": added(names.PREFILLS_DROPPED.name),
        "redis_bytes_per_s": (bytes_after - bytes_before) / seconds,
        "metrics_p99_s": _quantile(watch.answer_s, 99),
        "metrics_longest_s": max(watch.answer_s, default=None),
        "most_bytes": watch.most_bytes,
        "memory_limits": memory_limits(),
        "leases_lost": added(names.LEASES_EXPIRED.name) + added(names.STATE_LOSSES.name),
        "rounds_left_over": left,
        "clients_late_s": seen.late_s,
        "clients_cpu_share": used_s / seconds,
        "cpu_shares": {
            kind: (after_s - cpu_before_s.get(kind, 0.0)) / seconds for kind, after_s in cpu_after_s.items()
        },
        "machine_load": os.getloadavg()[1],
    }


async def _until_idle(watch: Watch) -> float:
    """Wait until the graph has dropped the rounds of the clients that were broken off; the rounds that it keeps."""
    for _ in range(120):
        now = await watch.metrics()
        kept = now[names.ROUNDS_IN_PROGRESS.name] + now[names.QUEUE_TASKS.name] + now[names.WORKER_ROUNDS.name]
        if not kept:
            break
        await asyncio.sleep(1.0)
    return kept


def _quantile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each load."""
    lines = [
        "| load | sessions/s | goodput (rounds/s) | accepted | P50 / P99 TTFT (s) | refused | with `Retry-After` "
        "| other statuses | longest queue | largest view (kB) | Redis (kB/s) | /metrics P99 / max (ms) | leases lost "
        "| left over |",
        "| --- " * 14 + "|",
    ]
    for row in results:
        named, p50_s, p99_s = row["refused_with_time"], row["ttft_p50_s"] or 0.0, row["ttft_p99_s"] or 0.0
        cells = [
            f"{row['load']:g}x",
            f"{row['sessions_per_s']:.2f}",
            f"{row['goodput_rounds_per_s']:.2f}",
            f"{row['accepted']}",
            f"{p50_s:.2f} / {p99_s:.2f}",
            f"{row['refused_share']:.0%}",
            "-" if named is None else f"{named:.0%}",
            _others(row["statuses"]),
            f"{row['most_queued']:.0f}",
            f"{row['most_published']['view_bytes'] / 1e3:.1f}",
            f"{row['redis_bytes_per_s'] / 1e3:.0f}",
            f"{1e3 * (row['metrics_p99_s'] or 0.0):.0f} / {1e3 * (row['metrics_longest_s'] or 0.0):.0f}",
            f"{row['leases_lost']:.0f}",
            f"{row['rounds_left_over']:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| process | " + " | ".join(f"{row['load']:g}x (MiB)" for row in results) + " | limit (MiB) |"]
    lines.append("| --- " * (len(results) + 2) + "|")
    limits = {kind: f"{limit >> 20}" for kind, limit in memory_limits().items()}
    for kind, limit in {**limits, **{kind: f"in that of the {of}" for kind, of in CONTAINER_OF.items()}}.items():
        most = [f"{row['most_bytes'].get(kind, 0) / (1 << 20):.0f}" for row in results]
        lines.append(f"| {kind} | " + " | ".join(most) + f" | {limit} |")
    return "\n".join(lines)


def _others(statuses: Mapping[int, int]) -> str:
    """How often there were other statuses than 200 and 429."""
    names = {_BROKEN: "broken stream"}
    found = [
        f"{names.get(status, status)}: {times}" for status, times in statuses.items() if status not in (200, OVERLOADED)
    ]
    return ", ".join(found) or "-"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
