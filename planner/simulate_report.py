"""The report of `ampd simulate`: attainment over rate, latencies, routes, and the activity of the workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ampd.reports.figures import format_ms, format_share
from ampd.reports.page import Section, write_page
from ampd.reports.plots import FULL_CARD_WIDTH, HALF_CARD, colours, draw_cdf, legend_above, mark_missed, svg
from ampd.types import ATTAINMENT, Slo
from planner.combination import Combination, papers_note
from planner.simulator.outcome import SimulatedRound, SimulationRun
from workloads.results import MissedRound, PromptTokens, RoundRecord, local_share, missed_rounds

_KINDS = {"prefill": "#e07b39", "decode": "#2f6fde", "kv-history": "#7b4fc9", "kv-increment": "#1f9d78"}
_MOST_LANES = 24
_MOST_MISSED = 100
"""Missed rounds that the report lists."""
_TIMELINE_SHARE = 0.15
"""Share of the run, around its middle, in the picture of the workers."""


def write_report(
    path: Path, whole: dict[str, Any], combinations: Sequence[Combination], runs: Sequence[SimulationRun], slo: Slo
) -> None:
    """Write the report of all combinations. Raises `RunError` if the file cannot be written."""
    rate, shown = _at_one_rate(combinations, runs)
    suffix = f" at {rate:g} sessions/s" if rate else ""
    reasons = [row for label, run in shown.items() for row in _reasons(label, run)]
    sections = [
        Section("Results", head=_HEAD, rows=_rows(combinations, whole["results"])),
        *_attainments(combinations, whole["results"]),
        *_distributions(shown, slo, suffix),
        Section(f"Routes and reasons{suffix}", head=("", "route", "reason", "rounds", "share"), rows=reasons),
    ]
    first = next(iter(shown))
    if missed := _missed(shown[first], slo):
        sections.append(_missed_section(f"Rounds that missed a target{suffix}: {first}", missed))
    for label, run in list(shown.items())[:2]:
        if run.timeline:
            height = 0.6 + 0.26 * min(len(run.worker_roles), _MOST_LANES)
            picture = svg(partial(_workers, run=run, missed=_missed(run, slo)), (FULL_CARD_WIDTH, max(height, 1.8)))
            sections.append(Section(f"What the workers did{suffix}: {label}", svg=picture))
    model, note = whole["performance_model"], papers_note(combinations)
    lead = (
        f"{whole['trace']}, seed {whole['seed']}; {model['model']} on {model['gpu']} ({model['kind']} performance "
        f"model); targets TTFT {slo.ttft_s * 1e3:g} ms, ITL {slo.itl_s * 1e3:g} ms. Simulated, not measured: "
        "a round is attained if the performance model predicts its first token and the mean gap of the others within "
        f"the targets.{' ' + note if note else ''}"
    )
    write_page(path, "Simulation", lead, sections)


def _attainments(combinations: Sequence[Combination], results: Sequence[dict[str, Any]]) -> Iterator[Section]:
    """Attainment over the rate, if several rates were simulated."""
    if len({combination.rate for combination in combinations}) > 1:
        for what in ("rounds", "sessions"):
            picture = svg(partial(_attainment, combinations=combinations, results=results, what=what), HALF_CARD)
            yield Section(f"Attainment of {what} over the session rate", svg=picture, is_half=True)


def _distributions(shown: Mapping[str, SimulationRun], slo: Slo, suffix: str) -> Iterator[Section]:
    """How the latencies of the rounds are distributed."""
    for title, key, index_of, target_s in (
        ("TTFT of initial prefills", "ttft_s", lambda index: index == 0, slo.ttft_s),
        ("TTFT of incremental prefills", "ttft_s", lambda index: index > 0, slo.ttft_s),
        ("Mean ITL of rounds", "itl_s", lambda _: True, slo.itl_s),
        ("Rounds, end to end", "e2e_s", lambda _: True, None),
    ):
        series = {
            label: (
                [v for record in run.rounds if index_of(record.index) and (v := getattr(record, key)) is not None],
                colour,
            )
            for (label, run), colour in zip(shown.items(), colours(len(shown)), strict=True)
        }
        picture = svg(partial(draw_cdf, series=series, target_s=target_s, label="ms"), HALF_CARD)
        yield Section(title + suffix, svg=picture, is_half=True)


def _missed(run: SimulationRun, slo: Slo) -> list[MissedRound]:
    return missed_rounds([_as_recorded(round_) for round_ in run.rounds], slo)


_MISSED_HEAD = ("sent at", "session", "round", "missed", "why")


def _as_recorded(round_: SimulatedRound) -> RoundRecord:
    """The round as a replay would record it, so that both reports find the same causes.

    From the start of its computation to its first token it counts as prefill, with the work of others between slices.
    """
    queued_s = round_.prefill.queued_s
    return RoundRecord(
        round_.session_id,
        round_.index,
        round_.sent_s,
        PromptTokens(round_.hist_tokens, round_.incr_tokens),
        ttft_s=round_.ttft_s,
        gaps_s=[] if round_.itl_s is None else [round_.itl_s],
        e2e_s=round_.e2e_s,
        error=round_.error,
        decision={
            "route": round_.route,
            "reason": round_.placed.reason,
            "incr_tokens": round_.incr_tokens,
            "queued_s": queued_s,
            "ttft_s": round_.ttft_s,
            "prefill_s": max((round_.ttft_s or 0.0) - queued_s, 0.0),
            "hit_tokens": {"recomputed": round_.prefill.missing_tokens},
        },
    )


def _missed_section(title: str, missed: Sequence[MissedRound]) -> Section:
    rows = [
        [f"{each.sent_s:.1f} s", each.session_id, str(each.index + 1), each.targets, each.causes]
        for each in missed[:_MOST_MISSED]
    ]
    return Section(f"{title} ({len(missed)})", head=_MISSED_HEAD, rows=rows, anchor="missed", is_list=True)


_HEAD = ("", "rate", "cluster", "rounds attained", "sessions", "TTFT P95", "ITL P95", "local", "KV lost", "errors")


def _rows(combinations: Sequence[Combination], results: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [_row(combination.label, result) for combination, result in zip(combinations, results, strict=True)]


def _row(label: str, result: dict[str, Any]) -> list[str]:
    reached = result["attainment"]
    return [
        label,
        f"{result['rate']:g}" if result["rate"] else "-",
        result["cluster"],
        format_share(reached["rounds"]),
        format_share(reached["sessions"]),
        f"{format_ms(result['ttft_s']['p95'])} ms",
        f"{format_ms(result['itl_s']['p95'])} ms",
        format_share(local_share(result)),
        str(result["lost_sessions"]),
        str(result["errors"]),
    ]


def _at_one_rate(
    combinations: Sequence[Combination], runs: Sequence[SimulationRun]
) -> tuple[float | None, dict[str, SimulationRun]]:
    """The middle rate and its runs by label. Latencies of several rates in one picture would hide each other."""
    rates = sorted({combination.rate or 0.0 for combination in combinations})
    rate = rates[len(rates) // 2]
    return rate or None, {
        combination.label: run
        for combination, run in zip(combinations, runs, strict=True)
        if (combination.rate or 0.0) == rate
    }


def _attainment(axes: Any, combinations: Sequence[Combination], results: Sequence[dict[str, Any]], what: str) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for combination, result in zip(combinations, results, strict=True):
        lines.setdefault(combination.label, []).append((combination.rate or 0.0, result["attainment"][what] or 0.0))
    for number, ((label, points), colour) in enumerate(zip(lines.items(), colours(len(lines)), strict=True)):
        # Every second line is dashed, so that equal results show both colours.
        style = {"marker": "o", "markersize": 3.5, "linestyle": "--" if number % 2 else "-"}
        axes.plot(*zip(*sorted(points), strict=True), color=colour, label=label, **style)
    axes.axhline(ATTAINMENT, color="#9aa3b2", linestyle=":", linewidth=1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("sessions per second")
    axes.set_ylabel("share that meets both targets")
    legend_above(axes, columns=2)


def _reasons(label: str, run: SimulationRun) -> list[list[str]]:
    counts = Counter((record.route, record.placed.reason) for record in run.rounds if record.route)
    total = sum(counts.values())
    return [
        [label, str(route), reason, str(count), f"{count / total:.1%}"]
        for (route, reason), count in counts.most_common()
    ]


def _workers(axes: Any, run: SimulationRun, missed: Sequence[MissedRound]) -> None:
    """A part from the middle of the run: one line per worker, with incoming KV as thin bars above it.

    A triangle marks when a round missed a target: a late first token at the worker of the prefill, else at the
    session's decode worker.
    """
    start_s = run.duration_s * (0.5 - _TIMELINE_SHARE / 2)
    end_s = start_s + run.duration_s * _TIMELINE_SHARE
    lanes = {worker_id: lane for lane, worker_id in enumerate(list(run.worker_roles)[:_MOST_LANES])}
    for kind, colour in _KINDS.items():
        spans = [
            (lanes[span.worker_id], max(span.start_s, start_s), min(span.end_s, end_s))
            for span in run.timeline
            if span.kind == kind and span.worker_id in lanes and span.end_s > start_s and span.start_s < end_s
        ]
        if not spans:
            continue
        lane, left, right = np.array(spans).T
        is_kv = kind.startswith("kv")
        axes.barh(
            lane - (0.34 if is_kv else 0),
            right - left,
            left=left,
            height=0.18 if is_kv else 0.5,
            color=colour,
            linewidth=0,
            label=kind,
        )
    workers = {
        (each.session_id, each.index): (each.placed.worker_id, each.placed.decode_worker_id) for each in run.rounds
    }
    marks = [
        (late.at_s, lanes[worker_id])
        for late in missed
        if start_s <= late.at_s <= end_s
        and (worker_id := workers[late.session_id, late.index][not late.targets.startswith("TTFT")]) in lanes
    ]
    mark_missed(axes, [at_s for at_s, _ in marks], [lane for _, lane in marks])
    axes.set_yticks(list(lanes.values()), list(lanes), fontsize=8)
    axes.set_xlim(start_s, end_s)
    axes.set_xlabel("virtual seconds")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    legend_above(axes)
