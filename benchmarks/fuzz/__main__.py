"""Gives changed inputs to every parser and to every receiver of a message between processes.

    python -m benchmarks.fuzz [--inputs 100000] [--only NAME] [--seed TEXT] [--json]

An input is a valid one with one to four changes. It must be accepted, or refused with the error that the receiver
declares, within 60 s. What is accepted goes on to the decisions that use it, and those must be possible. Exit code 1:
an input failed. The seed of a failure makes it again: `--only TARGET --seed SEED --inputs 1`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.fuzz import (
    children,
    http_answers,
    inputs,
    kv_answers,
    messages,
    model_files,
    ranks,
    sglang_messages,
)
from benchmarks.fuzz.peer_reads import FuzzedReader
from benchmarks.fuzz.redis_answers import FuzzedRedis
from benchmarks.fuzz.relayed import FuzzedRelay
from benchmarks.fuzz.sessions import FuzzedSessions
from benchmarks.fuzz.target import Failure, Target, try_one
from benchmarks.fuzz.workers import FuzzedWorker

_MOST_SHOWN = 20


@contextmanager
def all_targets() -> Iterator[list[Target]]:
    """Every target, while the worker and the folder for files exist."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ampd-fuzz-"))
        worker = stack.enter_context(closing(FuzzedWorker()))
        reader = stack.enter_context(closing(FuzzedReader()))
        sessions = stack.enter_context(closing(FuzzedSessions()))
        of_files = (inputs, model_files, children)
        of_messages = (messages, kv_answers, ranks, http_answers, sglang_messages)
        with_files = [target for kind in of_files for target in kind.targets(Path(folder))]
        without_state = [*with_files, *(target for kind in of_messages for target in kind.targets())]
        relay = stack.enter_context(closing(FuzzedRelay()))
        redis = stack.enter_context(closing(FuzzedRedis()))
        with_state = (worker, reader, sessions, relay, redis)
        yield [*without_state, *(target for each in with_state for target in each.targets())]


@contextmanager
def _silent() -> Iterator[None]:
    """Without log lines, because each refusal has one."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz, and print a line per target."""
    parser = argparse.ArgumentParser(prog="benchmarks.fuzz", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inputs", type=int, default=100_000, help="over all chosen targets")
    parser.add_argument("--only", default="", help="the target of this name, or those whose name contains it")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    with _silent(), all_targets() as targets:
        exact = [target for target in targets if options.only == target.name]
        chosen = exact or [target for target in targets if options.only in target.name]
        failures, rows = [], []
        for target in chosen:
            row, failed = _fuzz(target, options.seed, -(-options.inputs // len(chosen)))
            rows.append(row)
            failures += failed
            if not options.json:
                print("{target:<26} {inputs:>7} inputs  {accepted:>6} accepted  {refused:>6} refused  "
                      "{failed:>4} failed  slowest {slowest_s:.3f} s".format(**row), flush=True)  # fmt: skip
    total = {"inputs": sum(row["inputs"] for row in rows), "failed": len(failures)}
    if options.json:
        print(json.dumps({"targets": rows, **total}))
    else:
        print(f"{total['inputs']} inputs, {total['failed']} failed")
    for failure in failures[:_MOST_SHOWN]:
        print(
            f"\n{failure.target}, seed {failure.seed}: {failure.kind}\n{failure.given}\n{failure.trace}",
            file=sys.stderr,
        )
    return 1 if failures else 0


def _fuzz(target: Target, seed: str, count: int) -> tuple[dict[str, Any], list[Failure]]:
    verdicts: Counter[str] = Counter()
    failures: list[Failure] = []
    slowest_s = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(count):
            start_s = time.perf_counter()
            verdict = try_one(target, seed if count == 1 else f"{seed}.{number}")
            slowest_s = max(slowest_s, time.perf_counter() - start_s)
            if isinstance(verdict, Failure):
                failures.append(verdict)
            else:
                verdicts[verdict] += 1
    row = {"target": target.name, "inputs": count, "failed": len(failures), "slowest_s": slowest_s}
    return {**row, "accepted": verdicts["accepted"], "refused": verdicts["refused"]}, failures


if __name__ == "__main__":
    sys.exit(main())
