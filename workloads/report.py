"""The charts and tables of runs, replayed or simulated, one or several beside each other, and the report of a replay.

All of it is made from results (`workloads.results`) with their series, so it can be made again from their JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import floor, log10
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ampd.reports import counted, format_bytes, format_ms, format_number, format_share, text_table
from ampd.reports.page import Chart, Section, Series, Shape, write_page
from ampd.types import Slo
from workloads.results import RoundRecord, local_share, meets, missed_rounds, prompt_tokens_note

Result = Mapping[str, Any]
Runs = Mapping[str, Result]
"""Name -> result."""

_MS = 1e3
_LONGEST_NAME = 28
_MOST_SCATTERED = 3
"""Runs whose rounds are drawn one by one."""
_ROUTE_COLOURS = {"local": 0, "remote": 1, "error": 4, None: 7}


class _Figure(NamedTuple):
    """A line of the table of figures: its name, its value in a result, and the value as text."""

    name: str
    value: Callable[[Result], float | None]
    text: Callable[[float | None], str]


def _of(*path: str) -> Callable[[Result], float | None]:
    """The value at a path of a result; None: it is not there."""

    def value(result: Result) -> float | None:
        found: Any = result
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, int | float) else None

    return value


def _per_gpu(result: Result) -> float | None:
    rate, gpus = _of("throughput", "output_tokens_per_s")(result), result.get("gpus")
    return rate / gpus if rate is not None and gpus else None


def _latency(name: str, key: str) -> list[_Figure]:
    return [
        _Figure(f"{name} {which}, ms", _of(key, which.lower()), format_ms) for which in ("mean", "P50", "P95", "P99")
    ]


def _count(value: float | None) -> str:
    """What tells how long a run was. Its change says nothing."""
    return format_number(value)


_LATENCIES = (
    _Figure("rounds within both targets", _of("attainment", "rounds"), format_share),
    _Figure("sessions within both in all rounds", _of("attainment", "sessions"), format_share),
    *_latency("TTFT", "ttft_s"),
    _Figure("TTFT P95, initial prefills, ms", _of("ttft_initial_s", "p95"), format_ms),
    _Figure("TTFT P95, incremental prefills, ms", _of("ttft_incremental_s", "p95"), format_ms),
    *_latency("mean ITL", "mean_itl_s")[:3],
    _Figure("ITL P95 of single tokens, ms", _of("itl_s", "p95"), format_ms),
    _Figure("round, end to end, P95, ms", _of("e2e_s", "p95"), format_ms),
)
_LOAD = (
    _Figure("rounds per second", _of("throughput", "rounds_per_s"), format_number),
    _Figure("of these within both targets (goodput)", _of("throughput", "goodput_rounds_per_s"), format_number),
    _Figure("input tokens per second", _of("throughput", "input_tokens_per_s"), format_number),
    _Figure("output tokens per second", _of("throughput", "output_tokens_per_s"), format_number),
    _Figure("output tokens per second and GPU", _per_gpu, format_number),
    _Figure("output tokens per second and user", _of("throughput", "output_tokens_per_s_per_user"), format_number),
    _Figure("rounds in flight, mean", _of("throughput", "rounds_in_flight"), format_number),
    _Figure("input length (ISL) mean, tokens", _of("input_length_tokens", "mean"), format_number),
    _Figure("input length (ISL) P95, tokens", _of("input_length_tokens", "p95"), format_number),
    _Figure("output length (OSL) mean, tokens", _of("output_length_tokens", "mean"), format_number),
    _Figure("output length (OSL) P95, tokens", _of("output_length_tokens", "p95"), format_number),
    _Figure("prefilled locally", local_share, format_share),
    _Figure("history KV, decode to prefill", _of("kv_bytes", "history"), format_bytes),
    _Figure("increment KV, prefill to decode", _of("kv_bytes", "increment"), format_bytes),
    _Figure("sessions", _of("sessions"), _count),
    _Figure("rounds", _of("rounds"), _count),
    _Figure("errors", _of("errors"), _count),
    _Figure("seconds", _of("duration_s"), _count),
)


_NO_CHANGE = ("", "+0.0", "-0.0", "+0%", "-0%")


def figures(runs: Runs, wanted: Sequence[_Figure] = (*_LATENCIES, *_LOAD)) -> list[list[str]]:
    """A row per figure that a run has, with a column per run. From the second run on with the change from the first."""
    rows = []
    for name, value, text in wanted:
        values = [value(result) for result in runs.values()]
        if any(each is not None for each in values):
            cells = [text(values[0]), *(text(each) + _change(values[0], each, text) for each in values[1:])]
            rows.append([name, *cells])
    return rows


def figures_table(runs: Runs) -> str:
    """The same as text."""
    return text_table([["", *runs], *figures(runs)])


def _change(first: float | None, value: float | None, text: Callable[[float | None], str]) -> str:
    if first is None or value is None or text is _count:
        return ""
    change = f"{(value - first) * 100:+.1f}" if text is format_share else f"{value / first - 1:+.0%}" if first else ""
    return "" if change in _NO_CHANGE else f" ({change})"


def sections(runs: Runs) -> list[Section]:
    """The cards of one or several runs; those with rounds one by one are of the first few."""
    drawn = {name: result for name, result in runs.items() if result.get("series")}
    is_half = len(runs) == 1
    found = [
        Section("Targets and latencies", _changes(runs), ("", *runs), figures(runs, _LATENCIES), is_half=is_half),
        Section("Throughput and load", (), ("", *runs), figures(runs, _LOAD), is_half=is_half),
    ]
    if drawn:
        found += [*_distributions(drawn), *_courses(drawn)]
    for name, result in list(drawn.items())[:_MOST_SCATTERED]:
        found += _rounds(result, f": {name}" if len(runs) > 1 else "")
    for name, result in list(drawn.items())[:_MOST_SCATTERED]:
        anchor = "" if any(card.anchor for card in found) else "missed"
        found += _troubles(result, f": {name}" if len(runs) > 1 else "", anchor)
    if rows := [[name, *map(str, row[:2]), str(row[2])] for name, result in drawn.items() for row in _reasons(result)]:
        found.append(Section("Routes and reasons", head=("", "route", "reason", "rounds"), rows=rows))
    return found


def _changes(runs: Runs) -> list[str]:
    first = next(iter(runs))
    return [f"In brackets: the change from {first}; of shares in percentage points."] if len(runs) > 1 else []


def _reasons(result: Result) -> list[list[Any]]:
    return list(result["series"]["reasons"])


def _target(results: Mapping[str, Result], key: str) -> list[tuple[float, str]]:
    """The target of a latency in milliseconds, if the runs have the same."""
    targets = {slo[key] for result in results.values() if (slo := result.get("slo"))}
    return [(target * _MS, "target") for target in targets] if len(targets) == 1 else []


def _distributions(runs: Runs) -> list[Section]:
    ttft, itl = _target(runs, "ttft"), _target(runs, "itl")
    return [
        _by_percentile("TTFT of initial prefills", runs, "ttft_initial_s", "ms", ttft),
        _by_percentile("TTFT of incremental prefills", runs, "ttft_incremental_s", "ms", ttft),
        _by_percentile("Mean ITL of rounds", runs, "mean_itl_s", "ms", itl),
        _by_percentile("Rounds, end to end", runs, "e2e_s", "ms"),
        _by_percentile("Input length of rounds (ISL)", runs, "input_length_tokens", "tokens"),
        _by_percentile("Output length of rounds (OSL)", runs, "output_length_tokens", "tokens"),
    ]


def _by_percentile(title: str, runs: Runs, key: str, unit: str, levels: Sequence[tuple[float, str]] = ()) -> Section:
    factor = _MS if unit == "ms" else 1.0
    order = sorted(range(len(PERCENTS)), key=lambda index: PERCENTS[index])
    series: list[Series] = []
    for name, result in runs.items():
        if values := result["series"]["percentiles"][key]:
            x, y = [PERCENTS[index] for index in order], [values[index] * factor for index in order]
            series.append(Series(name, x, y, *line_style(len(series))))
    values = [value for each in series for value in each.y if value]
    is_log = bool(values) and max(values) > 20 * sorted(values)[len(values) // 2]
    return Section(title, chart=Chart("percentile of the rounds", unit, series, levels, is_log=is_log), is_half=True)


def line_style(number: int) -> tuple[Shape, int]:
    """Every second line is dashed, so that equal ones show both colours."""
    return ("dashed" if number % 2 else "line"), number


_COURSES = (
    ("Output tokens per second", {"": "output_tokens_per_s"}),
    ("Rounds per second", {"": "rounds_per_s", ", within both targets": "goodput_rounds_per_s"}),
    ("Sessions and rounds in flight", {", sessions": "sessions_in_flight", ", rounds": "rounds_in_flight"}),
    ("Input tokens per second", {"": "input_tokens_per_s"}),
)


_SHAPES: tuple[Shape, ...] = ("line", "dashed")


def _courses(runs: Runs) -> list[Section]:
    """How the runs went, over time."""
    found = []
    for title, keys in _COURSES:
        series: list[Series] = []
        for colour, (name, result) in enumerate(runs.items()):
            course = result["series"]["course"]
            for (suffix, key), shape in zip(keys.items(), _SHAPES, strict=False):
                if values := course.get(key):
                    x = [round((number + 0.5) * course["step_s"], 6) for number in range(len(values))]
                    series.append(Series(name + suffix, x, values, shape, colour))
        chart = Chart("seconds since the start", title.lower(), series)
        found.append(Section(f"{title} over time", chart=chart, is_half=True))
    return found


def _rounds(result: Result, suffix: str) -> list[Section]:
    """The TTFT of the rounds, one by one, over time."""
    sample, slo = result["series"]["sample"], result.get("slo")
    if not sample:
        return []
    levels = [(slo["ttft"] * _MS, "target")] if slo else []
    whole = result["rounds"] + result["errors"]
    part = f" {len(sample)} of the {whole} rounds are drawn." if len(sample) < result["rounds"] else ""
    chart = Chart("sent at, seconds", "TTFT, ms", _scattered(sample), levels, is_log=True, height=260)
    text = [f"Hollow: the round missed a target.{part}"]
    return [Section(f"TTFT of each round over time{suffix}", text=text, chart=chart)]


def _scattered(sample: Sequence[Sequence[Any]]) -> list[Series]:
    series = []
    for route, colour in _ROUTE_COLOURS.items():
        rows = [row for row in sample if row[5] == route and row[3] is not None]
        if rows:
            x, y = [row[2] for row in rows], [row[3] * _MS for row in rows]
            filled = [row[6] is not False for row in rows]
            series.append(Series(route or "rounds", x, y, "points", colour, filled, [_note(row) for row in rows]))
    return series


def _note(row: Sequence[Any]) -> str:
    return f"{format_ms(row[3], 0)} ms, {shortened(row[0])} round {row[1] + 1}"


def shortened(name: str) -> str:
    """A long name with its beginning and its end."""
    half = _LONGEST_NAME // 2 - 1
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}...{name[-half:]}"


_MISSED_HEAD = ("sent at", "session", "round", "missed", "why")


def _troubles(result: Result, suffix: str, anchor: str) -> list[Section]:
    """The rounds that missed a target, and the errors."""
    series, found = result["series"], []
    if series["missed"]:
        rows = [
            [f"{sent_s:.1f} s", shortened(session), str(index + 1), targets, causes or "the endpoint reports no reason"]
            for sent_s, session, index, targets, causes in series["missed"]
        ]
        left = series["missed_in_all"] - len(rows)
        found.append(
            Section(
                f"Rounds that missed a target{suffix} ({series['missed_in_all']})",
                text=[f"{left} later ones are not listed."] if left else (),
                head=_MISSED_HEAD,
                rows=rows,
                anchor=anchor,
                is_list=True,
            )
        )
    if series["errors"]:
        rows = [[text, str(count)] for text, count in series["errors"]]
        head = ("message", "rounds")
        found.append(Section(f"Errors{suffix} ({result['errors']})", head=head, rows=rows, is_warning=True))
    return found


def tiles(result: Result) -> list[tuple[str, str]]:
    """The figures at the head of the report of one run."""
    throughput = result["throughput"]
    return [
        (format_share(result["attainment"]["rounds"]), "of rounds within both targets"),
        (format_share(result["attainment"]["sessions"]), "of sessions in all their rounds"),
        (f"{format_ms(result['ttft_s']['p95'], 0)} ms", "TTFT, 95th percentile"),
        (f"{format_ms(result['mean_itl_s']['p95'])} ms", "mean ITL of a round, 95th percentile"),
        (format_number(throughput["output_tokens_per_s"]), "output tokens per second"),
        (format_number(throughput["rounds_in_flight"]), "rounds in flight on average"),
    ]


# -- the report of a replay


def write_replay_report(path: Path, result: Result) -> None:
    """Write the report of a replay, from the object that `--json` writes. Raises `RunError` if it cannot be written."""
    settings = result["settings"]
    against = f" against {settings['url']}, model {settings['model']}, finished {settings['finished']}"
    state = "Interrupted: this is what had been seen until then. " if result["interrupted"] else ""
    slo = result["slo"]
    targets = f"Targets: TTFT {slo['ttft'] * _MS:g} ms, ITL {slo['itl'] * _MS:g} ms. " if slo else ""
    note = f" Prompt tokens: {tokens}." if (tokens := prompt_tokens_note(result)) else ""
    lead = (
        f"{state}{counted(result['sessions'], 'session')}, {counted(result['rounds'], 'round')} in "
        f"{result['duration_s']:.1f} s{against}. "
        f"{targets}Times are from the sending of a round, as its client measured them.{note}"
    )
    rows = [[name, str(value)] for name, value in settings.items() if value is not None]
    cards = [*sections({"replay": result}), Section("Settings", head=("flag", "value"), rows=rows, is_half=True)]
    write_page(path, f"Replay of {settings['trace']}", lead, cards, tiles(result))


# -- What the charts are drawn from: a few kilobytes, however many rounds a run had.
#
# It is a part of a result's JSON, so that a report can be made again, and runs can be compared, without their rounds.

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
        "missed": [[_short(each.sent_s), *each[1:]] for each in missed],
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


def _rounded(values: Floats) -> list[float]:
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}") if abs(value) < 10**_DIGITS else round(value, 1)
