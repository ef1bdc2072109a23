"""The HTML reports of `ampd plan` and `ampd simulate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from ampd.reports import format_ms, format_number, format_share
from ampd.reports.page import (
    FULL_CARD_WIDTH,
    HALF_CARD,
    TARGET_COLOUR,
    Section,
    colours,
    draw_cdf,
    legend_above,
    mark_missed,
    svg,
    write_page,
)
from ampd.types import ATTAINMENT, Slo
from planner.case_settings import Combination, papers_note
from planner.layout.explain import BINDS, gpus_text, rate_text
from planner.layout.layout import layout_label
from planner.layout.trial import IN_TIME
from planner.simulator.outcome import SimulatedRound, SimulationRun
from workloads.results import MissedRound, PromptTokens, RoundRecord, local_share, missed_rounds

# -- ampd plan: the layouts, their price, their limits and the command

_PLAN_HEAD = (
    "layout",
    "GPUs",
    "rounds attained",
    "95 % interval",
    "carries, sessions/s",
    "95 % interval",
    "TTFT P95",
    "mean ITL P95",
    "local",
)

_CURVES = (
    "A full mark is a rate that is carried. An empty one is not: here or in the other picture it is below the dashed "
    "line, or other seeds fail. A triangle is a simulation that was stopped, and has at most that share. No line joins "
    "it. The dotted line is the plan's rate."
)
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2)
"""The share axis begins at a multiple of the first of them of which so many suffice."""
_MOST_STEPS = 6
_ROUNDING = 1e-9


def write_plan_report(path: Path, result: dict[str, Any]) -> None:
    """Write the report of a plan. Raises `RunError` if the file cannot be written."""
    layouts = result["layouts"]
    why = Section("Why", text=result["explanation"])
    sections = [why, _reproduction(result)]
    if layouts:
        best_first = Section("Layouts, best first", head=_PLAN_HEAD, rows=[_layout_row(layout) for layout in layouts])
        sections = [best_first, why, *_curve_pictures(result), _price(result), _limits(layouts), _reproduction(result)]
    slo, model = result["slo"], result["performance_model"]
    rate = rate_text(result["rate"])
    lead = (
        f"{result['summary']} Planned for {result['trace']} at {rate} sessions/s on {gpus_text(result['gpus'])}; "
        f"{model['model']} on {model['gpu']} ({model['kind']} performance model); "
        f"targets TTFT {slo['ttft'] * 1e3:g} ms, ITL {slo['itl'] * 1e3:g} ms. It took {result['seconds']:.1f} s. "
        "All figures are simulated with the performance model. A round is attained if its TTFT and its mean ITL are "
        "within the targets. Mean ITL P95 is over the rounds. A rate is "
        f"carried if {result['attainment_level']:.0%} of the rounds are attained and nearly all sessions end in time."
    )
    write_page(path, "Plan", lead, sections)


def _layout_row(layout: dict[str, Any]) -> list[str]:
    simulated = layout["simulated"]
    return [
        layout_label(layout),
        str(layout["gpus"]),
        *_figure(layout["attainment"], 100, "%"),
        *_carries(layout),
        f"{format_ms(simulated['ttft_s']['p95'], 0)} ms",
        f"{format_ms(simulated['mean_itl_s']['p95'])} ms",
        format_share(local_share(simulated), 0),
    ]


def _carries(layout: dict[str, Any]) -> tuple[str, str]:
    """The goodput of a layout, and its interval."""
    if not layout["goodput"]:
        return "-", "-"
    return _figure(layout["goodput"])


def _price(result: dict[str, Any]) -> Section:
    """GPU hours, and prices if a GPU has one, of the layouts and of the next GPUs."""
    has_price = result["gpu_price"] is not None
    head = ("layout", "GPUs", "GPU hours per 1000 sessions", *(("price per hour",) if has_price else ()))

    def row(layout: dict[str, Any]) -> list[str]:
        price = [f"{layout['price_per_hour']:.2f}"] if has_price else []
        hours = format_number(layout["gpu_hours_per_1000_sessions"])
        return [layout_label(layout), str(layout["gpus"]), hours, *price]

    rows = [row(layout) for layout in result["layouts"]]
    text = [
        f"GPU hours are for {rate_text(result['rate'])} sessions/s, or for the rate that the layout carries "
        "if that is less. A dash: it is not known."
    ]
    if (step := result["next_step"]) is not None:
        rows.append(row(step))
        mean, interval = _figure(step["gain"])
        text.append(f"The last line is with the next GPUs. Gain: {mean} sessions/s (95 % interval: {interval}).")
    return Section("Price", text=text, head=head, rows=rows, is_half=True)


def _limits(layouts: list[dict[str, Any]]) -> Section:
    """What binds each layout, and its reserves at the planned rate."""
    head = ("layout", "TTFT target / P95", "mean ITL target / P95", "KV memory / need", "GPUs not used", "what binds")
    rows = []
    for layout in layouts:
        slack = layout["slack"]
        memory = " / ".join(_times(slack[name]) for name in ("kv_memory", "host_memory") if name in slack)
        times = [_times(slack.get(name)) for name in ("prefill", "decode")]
        rows.append([layout_label(layout), *times, memory, str(slack["gpus_left"]), BINDS[slack["binds"]]])
    return Section("What binds", head=head, rows=rows, is_list=True)


def _reproduction(result: dict[str, Any]) -> Section:
    text = [
        result["command"],
        f"AMPD {result['version']}, seed {result['seed']}, {result['trials']} simulations. "
        f"Variables AMPD_* of the environment count as flags. {_end(result)}",
        f"Policies: {result['routing']} (routing), {result['ordering']} (ordering), {result['slicing']} (slicing).",
    ]
    return Section("How to reproduce", text=text, is_half=True)


def _end(result: dict[str, Any]) -> str:
    """How the simulations ended, which decides whether another run gives the same plan."""
    if result["stopped"]:
        return f"The search ended early, because {result['stopped']}, so another run may find another layout."
    return "The search came to its end, so this command gives the same plan again with the same trace."


def _times(reserve: float | None) -> str:
    return "-" if reserve is None else f"{reserve:.2f}x"


def _figure(figure: dict[str, Any], factor: float = 1.0, unit: str = "") -> tuple[str, str]:
    """The mean and the interval of a figure as text."""
    mean, low, high = (None if figure[key] is None else figure[key] * factor for key in ("mean", "low", "high"))
    interval = "-" if low is None or high is None else f"{format_number(low)} to {format_number(high)}{unit}"
    return f"{format_number(mean)}{unit}", interval


def _curve_pictures(result: dict[str, Any]) -> list[Section]:
    """Both shares that decide whether a rate is carried, over the rates that were tried."""
    pictures: tuple[tuple[str, str, float, str, list[str]], ...] = (
        ("Rounds attained", "attainment", result["attainment_level"], "share that meets both targets", [_CURVES]),
        ("Sessions in time", "sessions_in_time", IN_TIME, "share that ends in time", []),
    )
    return [
        Section(
            f"{title} over the session rate",
            text=text,
            svg=svg(partial(_curves, result=result, key=key, level=level, label=label), HALF_CARD),
            is_half=True,
        )
        for title, key, level, label, text in pictures
    ]


def _curves(axes: Any, result: dict[str, Any], key: str, level: float, label: str) -> None:
    """A share at the rates that the search of each layout's goodput tried. `_CURVES` explains the marks."""
    shares = [level]
    for layout, colour in zip(result["layouts"], colours(len(result["layouts"])), strict=True):
        whole = [(each["rate"], each[key]) for each in layout["curve"] if not each["is_most"]]
        axes.plot([rate for rate, _ in whole], [share for _, share in whole], color=colour, label=layout_label(layout))
        for each in layout["curve"]:
            shape, fill = "v" if each["is_most"] else "o", colour if each["carries"] else "none"
            axes.plot(each["rate"], each[key], color=colour, marker=shape, markersize=3.5, markerfacecolor=fill)
            shares.append(each[key])
    axes.axhline(level, color=TARGET_COLOUR, linestyle="--", linewidth=1)
    axes.axvline(result["rate"], color=TARGET_COLOUR, linestyle=":", linewidth=1)
    least = axis_start(min(shares))
    axes.set_ylim(least, 1 + 0.02 * (1 - least))
    axes.set_xlabel("sessions per second")
    axes.set_ylabel(label)
    legend_above(axes, columns=1)


def axis_start(share: float) -> float:
    """A round share below this one, at which an axis up to 1 begins."""
    step = next((step for step in _STEPS if 1 - share < _MOST_STEPS * step), _STEPS[-1])
    return max(round((ceil(share / step - _ROUNDING) - 1) * step, 2), 0.0)


# -- ampd simulate: attainment over the rate, latencies, routes, and the activity of the workers

_KINDS = {"prefill": "#e07b39", "decode": "#2f6fde", "kv-history": "#7b4fc9", "kv-increment": "#1f9d78"}
_MOST_LANES = 24
_MOST_MISSED = 100
"""Missed rounds that the report lists."""
_TIMELINE_SHARE = 0.15
"""Share of the run, around its middle, in the picture of the workers."""


def write_simulation_report(
    path: Path, whole: dict[str, Any], combinations: Sequence[Combination], runs: Sequence[SimulationRun], slo: Slo
) -> None:
    """Write the report of all combinations. Raises `RunError` if the file cannot be written."""
    rate, shown = _at_one_rate(combinations, runs)
    suffix = f" at {rate:g} sessions/s" if rate else ""
    rows = [_row(each.label, result) for each, result in zip(combinations, whole["results"], strict=True)]
    reasons = [row for label, run in shown.items() for row in _reasons(label, run)]
    sections = [
        Section("Results", head=_HEAD, rows=rows),
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

    From the start of its computation to its first token it counts as prefill, with the work of others between passes.
    """
    queued_s = round_.queued_s
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
            "reason": round_.reason,
            "incr_tokens": round_.incr_tokens,
            "queued_s": queued_s,
            "ttft_s": round_.ttft_s,
            "prefill_s": max((round_.ttft_s or 0.0) - queued_s, 0.0),
            "hit_tokens": {"recomputed": round_.missing_tokens},
        },
    )


def _missed_section(title: str, missed: Sequence[MissedRound]) -> Section:
    rows = [
        [f"{each.sent_s:.1f} s", each.session_id, str(each.index + 1), each.targets, each.causes]
        for each in missed[:_MOST_MISSED]
    ]
    return Section(f"{title} ({len(missed)})", head=_MISSED_HEAD, rows=rows, anchor="missed", is_list=True)


_HEAD = ("", "rate", "cluster", "rounds attained", "sessions", "TTFT P95", "ITL P95", "local", "KV lost", "errors")


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
    counts = Counter((record.route, record.reason) for record in run.rounds if record.route)
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
    workers = {(each.session_id, each.index): (each.worker_id, each.decode_worker_id) for each in run.rounds}
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
