"""What it costs a coordinator to observe one round: metrics, the window of `ampd top`, the log line of its end.

    python -m benchmarks.observation_cost [--rounds 20000] [--json]

Medians over blocks of rounds, in microseconds, and as a ratio to one PING of a Redis on this machine over a unix
socket, in turn with it: the coordinator waits for about one such round trip a round.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import open_store
from ampd.telemetry.logs import JsonFormatter, RoundLog, TextFormatter
from ampd.types import Slo
from router.coordinator_metrics import RoundRecorder
from router.decision_record import DecisionRecord, Observer
from router.round_log import end_logger
from router.round_log import log as round_logger
from router.round_window import RoundWindow

_BLOCK = 500


def served_rounds(count: int, rng: random.Random) -> list[DecisionRecord]:
    """Rounds of all kinds of outcomes, two routes and four reasons."""
    reasons = ("on-time", "fewest-late", "hopeless", "resumed")
    return [
        DecisionRecord(
            f"session-{number % 100}",
            "predictive",
            Slo(1.0, 0.05),
            route=rng.choice(("local", "remote")),
            reason=rng.choice(reasons),
            hist_tokens=rng.randrange(20_000),
            incr_tokens=rng.randrange(1, 2000),
            is_initial=number % 7 == 0,
            is_complete=True,
            was_left=False,
            lasted_s=2.0,
            ttft_s=rng.expovariate(2.0),
            itl_s=rng.expovariate(30.0),
            output_tokens=50,
        )
        for number in range(count)
    ]


def log_lines(formatter: logging.Formatter) -> Observer:
    """The line of a round's end, formatted and written to memory."""
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(formatter)
    round_logger.handlers = [handler]
    round_logger.propagate = False
    round_logger.setLevel(logging.INFO)
    return end_logger(RoundLog("end"))


def block_us(observe: Callable[[DecisionRecord], Any], rounds: Sequence[DecisionRecord]) -> float:
    """Time of one round in a block of them."""
    start_s = time.perf_counter()
    for record in rounds:
        observe(record)
    return (time.perf_counter() - start_s) / len(rounds) * 1e6


async def measured(count: int) -> dict[str, dict[str, float]]:
    """What is observed -> its median time in microseconds, and as a ratio to a PING."""
    rounds = served_rounds(_BLOCK, random.Random(0))
    observers: dict[str, Callable[[], Observer]] = {
        "metrics": RoundRecorder,
        "window of ampd top": RoundWindow,
        "log line, JSON": lambda: log_lines(JsonFormatter()),
        "log line, text": lambda: log_lines(TextFormatter()),
    }
    times_us: dict[str, list[float]] = {name: [] for name in observers}
    pings_us: list[float] = []
    with EmbeddedRedis() as redis:
        store = await open_store(redis.url, "benchmark")
        for _ in range(max(1, count // _BLOCK)):
            pings_us += [await store.ping() * 1e6 for _ in range(20)]
            for name, make in observers.items():
                times_us[name].append(block_us(make(), rounds))
        await store.close()
    ping_us = statistics.median(pings_us)
    medians = {name: statistics.median(values) for name, values in times_us.items()}
    return {name: {"us": value, "of_a_ping": value / ping_us} for name, value in medians.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; prints a Markdown table, or with `--json` one object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observation_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(argv)
    result = asyncio.run(measured(options.rounds))
    if options.json:
        print(json.dumps(result, indent=1))
        return 0
    print("| observed of a round | us | of a PING to Redis |\n| --- | --- | --- |")
    for name, each in result.items():
        print(f"| {name} | {each['us']:.1f} | {each['of_a_ping']:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
