"""Judges the trial of two engines: equal tokens over the KV exchange, rate of KV reads, times against a model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from ampd.cli.doctor.finding import Finding, Verdict
from ampd.cli.doctor.trial import RoundReading, TrialReading
from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism, Route

_READS, _TIMES = "KV reads", "times"
_JUDGED_BYTES = 8 << 20
"""Smaller reads show the time of a message, not a rate."""
_GOOD_SHARE_OF_RAW = 0.3
_IN_LOGS = "read the ends of the workers' logs in the file that --out writes"
_GOOD_FACTOR = 2.0
"""Times may differ from the performance model by this factor, either way."""


def judge_trial(
    reading: TrialReading, raw_gb_per_s: float | None, model: PerformanceModel | None, model_name: str, tp: int
) -> list[Finding]:
    """All findings of a trial.

    Args:
        raw_gb_per_s: of NIXL alone on this machine; None: not measured.
        model: predicts the times; None: there is none, and `model_name` is the reason.
    """
    if reading.problem:
        fix = (
            "the file that --out writes has the ends of the logs; a machine that is only slow needs a longer "
            "--start-timeout-s"
        )
        return [Finding("two engines", Verdict.WRONG, reading.problem, fix)]
    return [
        judge_tokens(reading.remote, reading.local, reading.again),
        judge_reads(reading.moves, raw_gb_per_s),
        judge_times(reading, model, model_name, tp),
    ]


def judge_tokens(
    remote: Sequence[RoundReading], local: Sequence[RoundReading], again: Sequence[RoundReading]
) -> Finding:
    """Whether the KV exchange gives the tokens of a local prefill. `again` shows whether the engine repeats itself."""
    name = "equal tokens"
    routes = [[each.record.get("route") for each in rounds] for rounds in (remote, local)]
    if routes != [[Route.REMOTE] * len(remote), [Route.LOCAL] * len(local)]:
        found = f"the rounds did not take their routes: {routes}"
        return Finding(name, Verdict.WRONG, found, f"{_IN_LOGS}: a read of KV may have failed")
    moved = [sum(each.record[f"kv_read_tokens_{kind}"] for each in remote) for kind in ("increment", "history")]
    found = (
        f"{len(remote)} rounds, {sum(len(each.tokens) for each in remote)} tokens; KV of {moved[0]} tokens read from "
        f"the prefill worker, of {moved[1]} tokens from the decode worker"
    )
    if not all(moved):
        return Finding(name, Verdict.WRONG, f"{found}: no KV was exchanged", _IN_LOGS)
    first = next((index for index, pair in enumerate(zip(remote, local, strict=True)) if _differ(*pair)), None)
    if first is None:
        return Finding(name, Verdict.OK, f"{found}; equal to those of the local route")
    place = _first_difference(remote[first].tokens, local[first].tokens)
    found += f"; round {first + 1} differs from token {place + 1} on"
    if any(_differ(*pair) for pair in zip(local, again, strict=True)):
        found += ", but two local runs differ too: this engine does not repeat itself"
        fix = "compare with --worker-args '--engine-args {\"enable_deterministic_inference\":true}'"
        return Finding(name, Verdict.SKIPPED, found, fix)
    fix = "try --worker-args '--dtype float32': if the tokens are equal then, it was rounding; else report it"
    return Finding(name, Verdict.WRONG, found, fix)


def _differ(first: RoundReading, second: RoundReading) -> bool:
    return first.tokens != second.tokens


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def judge_reads(moves: Sequence[RoundReading], raw_gb_per_s: float | None) -> Finding:
    """The rate of reads between the two workers, relative to NIXL alone."""
    name = _READS
    sizes = [each.record["kv_read_bytes_increment"] for each in moves]
    times_s = [each.record["kv_read_s_increment"] for each in moves]
    if not all(sizes) or not all(times_s):
        return Finding(name, Verdict.WRONG, "no KV was read", _IN_LOGS)
    rate = statistics.median(size / seconds / 1e9 for size, seconds in zip(sizes, times_s, strict=True))
    found = f"{sizes[0] / 1e6:.1f} MB in {statistics.median(times_s) * 1000:.1f} ms ({rate:.2f} GB/s)"
    if raw_gb_per_s is None or sizes[0] < _JUDGED_BYTES:
        return Finding(name, Verdict.OK, found)
    share = rate / raw_gb_per_s
    found += f", {share:.0%} of NIXL alone"
    if share < _GOOD_SHARE_OF_RAW:
        fix = f"if `load` is not ok, end other programs and run it again; else {_IN_LOGS}"
        return Finding(name, Verdict.SLOW, found, fix)
    return Finding(name, Verdict.OK, found)


def judge_times(reading: TrialReading, model: PerformanceModel | None, model_name: str, tp: int) -> Finding:
    """Prefills and decode steps relative to what a performance model predicts."""
    name, parallelism = _TIMES, Parallelism(tp=tp)
    if model is None:
        shown = [f"prefill of {tokens} tokens {seconds * 1000:.0f} ms" for tokens, seconds in reading.prefills]
        shown += [f"step of {batch} {seconds * 1000:.1f} ms" for batch, _, seconds in reading.steps]
        return Finding(name, Verdict.SKIPPED, f"{', '.join(shown)}; {model_name}", "")
    prefill = statistics.median(
        seconds / model.prefill_s(0, tokens, parallelism) for tokens, seconds in reading.prefills
    )
    decode = statistics.median(
        seconds / model.decode_step_s(batch, tokens, parallelism) for batch, tokens, seconds in reading.steps
    )
    found = f"prefills take {prefill:.2f} times and decode steps {decode:.2f} times as long as {model_name} predicts"
    if all(1 / _GOOD_FACTOR <= ratio <= _GOOD_FACTOR for ratio in (prefill, decode)):
        return Finding(name, Verdict.OK, found)
    return Finding(name, Verdict.SLOW, found, "measure it with `ampd profile`, and pass the file with --perf")


def as_modelled(finding: Finding) -> Finding:
    """A finding of modelled engines: their reads and times show nothing of the hardware."""
    if finding.check not in (_READS, _TIMES):
        return finding
    return replace(finding, found=f"{finding.found} (modelled, not measured)")
