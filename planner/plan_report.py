"""The report of `ampd plan`: a page to show around, with the layouts, their price, their limits and the command."""

from __future__ import annotations

from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from ampd.reports.figures import format_ms, format_number, format_share
from ampd.reports.page import Section, write_page
from ampd.reports.plots import HALF_CARD, TARGET_COLOUR, colours, legend_above, svg
from planner.layout.explain import BINDS, gpus_text, rate_text
from planner.layout.layout import layout_label
from planner.sustained import IN_TIME
from workloads.results import local_share

_HEAD = (
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


def write_report(path: Path, result: dict[str, Any]) -> None:
    """Write the report of a plan. Raises `RunError` if the file cannot be written."""
    layouts = result["layouts"]
    why = Section("Why", text=result["explanation"])
    sections = [why, _reproduction(result)]
    if layouts:
        best_first = Section("Layouts, best first", head=_HEAD, rows=[_row(layout) for layout in layouts])
        sections = [best_first, why, *_attainment(result), _price(result), _limits(layouts), _reproduction(result)]
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


def _row(layout: dict[str, Any]) -> list[str]:
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


def _attainment(result: dict[str, Any]) -> list[Section]:
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
