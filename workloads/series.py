"""What the charts of a report are drawn from: a few kilobytes, however many rounds a run had.

It is a part of a result's JSON, so that a report can be made again, and runs can be compared, without their rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import floor, log10
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampd.types import Slo
from workloads.results import MissedRound, RoundRecord, meets, missed_rounds

PERCENTS = (*range(101), 99.5, 99.9)
"""Of every distribution, in this order."""
_FEWEST_BINS, _MOST_BINS, _ROUNDS_PER_BIN = 20, 150, 5
_SAMPLE = 600
"""Rounds that are drawn one by one. Of more, every second or third, and so on."""
_MISSED = 100
"""Missed rounds with their causes. The records of a replay have all of them."""
_ERRORS, _ERROR_CHARACTERS = 10, 300
_DIGITS = 4

Floats = NDArray[np.floating[Any]]


def series_of(records: Sequence[RoundRecord], slo: Slo | None) -> dict[str, Any]:
    """Distributions, the course of the run, a sample of the rounds, and what went wrong."""
    done = [record for record in records if record.error is None and record.ttft_s is not None]
    missed = missed_rounds(records, slo, _MISSED) if slo else []
    reasons = Counter((record.route, str(record.decision.get("reason", "-"))) for record in done if record.route)
    errors = Counter((record.error or "")[:_ERROR_CHARACTERS] for record in records if record.error)
    return {
        "percentiles": {
            "ttft_initial_s": _percentiles([record.ttft_s for record in done if not record.index]),
            "ttft_incremental_s": _percentiles([record.ttft_s for record in done if record.index]),
            "mean_itl_s": _percentiles([record.itl_s for record in done]),
            "e2e_s": _percentiles([record.e2e_s for record in done]),
            "input_length_tokens": _percentiles([record.input_tokens for record in done]),
            "output_length_tokens": _percentiles([record.output_tokens for record in done]),
        },
        "course": _course([record for record in done if record.e2e_s is not None], slo),
        "sample": [_sampled(record, slo) for record in _spread(records)],
        "missed": [_missed_row(each) for each in missed],
        "missed_in_all": sum(not meets(record, slo) for record in records) if slo else 0,
        "reasons": [[route, reason, count] for (route, reason), count in reasons.most_common()],
        "errors": [[text, count] for text, count in errors.most_common(_ERRORS)],
    }


def _percentiles(values: Sequence[float | None]) -> list[float]:
    known = [value for value in values if value is not None]
    return _rounded(np.percentile(known, PERCENTS)) if known else []


def _course(done: Sequence[RoundRecord], slo: Slo | None) -> dict[str, Any]:
    """Means over equal times from the start of the run. Output tokens count evenly from a round's first to its last
    token, input tokens at the first one."""
    if not done:
        return {}
    sent, first, end = np.array([(each.sent_s, each.ttft_s, each.e2e_s) for each in done], dtype=float).T
    first, end = sent + first, sent + end
    bins = min(max(len(done) // _ROUNDS_PER_BIN, _FEWEST_BINS), _MOST_BINS)
    step_s = _round_step(float(end.max()) / bins)
    edges = np.arange(0.0, float(end.max()) + step_s, step_s)
    tokens = np.array([each.output_tokens for each in done], dtype=float)
    inputs = np.array([each.input_tokens for each in done], dtype=float)
    met = np.array([slo is not None and meets(each, slo) for each in done])
    began, ended = _sessions(done, sent, end)
    course = {
        "output_tokens_per_s": _spread_over(first, end, tokens, edges),
        "input_tokens_per_s": np.histogram(first, edges, weights=inputs)[0] / step_s,
        "rounds_per_s": np.histogram(end, edges)[0] / step_s,
        "rounds_in_flight": _spread_over(sent, end, end - sent, edges),
        "sessions_in_flight": _spread_over(began, ended, ended - began, edges),
    }
    if slo is not None:
        course["goodput_rounds_per_s"] = np.histogram(end[met], edges)[0] / step_s
    return {"step_s": step_s} | {name: _rounded(values) for name, values in course.items()}


def _sessions(done: Sequence[RoundRecord], sent: Floats, end: Floats) -> tuple[Floats, Floats]:
    """When each session sent its first round, and when its last one ended."""
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    for record, start_s, end_s in zip(done, sent.tolist(), end.tolist(), strict=True):
        name = record.session_id
        began[name] = min(began.get(name, start_s), start_s)
        ended[name] = max(ended.get(name, end_s), end_s)
    return np.array(list(began.values())), np.array(list(ended.values()))


def _spread_over(start: Floats, end: Floats, amounts: Floats, edges: Floats) -> Floats:
    """The amounts per second between the edges, each spread evenly from its start to its end."""
    lengths = np.maximum(end - start, 1e-9)
    sums = np.array([float(np.sum(amounts * np.clip((edge - start) / lengths, 0.0, 1.0))) for edge in edges])
    return np.diff(sums) / np.diff(edges)


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, ... and of their tenths, so that runs of similar length have the same steps."""
    power = 10.0 ** floor(log10(max(least, 1e-3)))
    return next(float(f"{factor * power:.3g}") for factor in (1, 2, 5, 10) if factor * power >= least)


def _spread(records: Sequence[RoundRecord]) -> list[RoundRecord]:
    in_order = sorted(records, key=lambda record: record.sent_s)
    return in_order[:: max(-(-len(in_order) // _SAMPLE), 1)]


def _sampled(record: RoundRecord, slo: Slo | None) -> list[Any]:
    """Session, round, times, route, and whether it met its targets (null without targets)."""
    times = [None if value is None else _short(value) for value in (record.sent_s, record.ttft_s, record.e2e_s)]
    route = "error" if record.error is not None else record.route
    return [record.session_id, record.index, *times, route, meets(record, slo) if slo else None]


def _missed_row(missed: MissedRound) -> list[Any]:
    return [_short(missed.sent_s), missed.session_id, missed.index, missed.targets, missed.causes]


def _rounded(values: Floats) -> list[float]:
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}") if abs(value) < 10**_DIGITS else round(value, 1)
