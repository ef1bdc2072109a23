"""The HTML reports of `ampd plan` and `ampd simulate`, made from what they print with `--json`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ampd.reports import counted, format_ms, format_number, format_share
from ampd.reports.page import Chart, Section, Series, write_page
from ampd.types import ATTAINMENT
from planner.layout.explain import BINDS, rate_text
from planner.layout.layout import layout_label
from planner.layout.trial import IN_TIME
from workloads.report import line_style, tiles
from workloads.report import sections as run_sections
from workloads.results import local_share

_MOST_WORKERS = 48

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
    "GPU hours per 1000 sessions",
)
_HOURS = "GPU hours are for the plan's rate, or for the rate that the layout carries if that is less. A dash: unknown."

_CURVES = (
    "A full mark is a rate that is carried. An empty one is not: here or in the other chart it is below the level, or "
    "other seeds fail. A point without a line is a simulation that was stopped, and has at most that share."
)
_PARETO = (
    "Each point is a layout at a rate that was simulated. Hollow: the rate is not carried. The line joins the carried "
    "points that no other one beats in both."
)


def write_plan_report(path: Path, result: dict[str, Any]) -> None:
    """Write the report of a plan. Raises `RunError` if the file cannot be written."""
    layouts = result["layouts"]
    why = Section("Why", text=result["explanation"])
    sections = [why, _reproduction(result)]
    if layouts:
        head = _PLAN_HEAD if result["gpu_price"] is None else (*_PLAN_HEAD, "price per hour")
        rows = [_layout_row(layout) for layout in layouts]
        best_first = Section("Layouts, best first", text=[_HOURS], head=head, rows=rows)
        sections = [
            best_first,
            why,
            *_pareto(result),
            *_curves(result),
            _limits(layouts),
            _reproduction(result),
        ]
    slo, model = result["slo"], result["performance_model"]
    rate = rate_text(result["rate"])
    lead = (
        f"{result['summary']} Planned for {result['trace']} at {rate} sessions/s on {counted(result['gpus'], 'GPU')}; "
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
        format_number(layout["gpu_hours_per_1000_sessions"]),
        *([f"{layout['price_per_hour']:.2f}"] if "price_per_hour" in layout else []),
    ]


def _carries(layout: dict[str, Any]) -> tuple[str, str]:
    """The goodput of a layout, and its interval."""
    if not layout["goodput"]:
        return "-", "-"
    return _figure(layout["goodput"])


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
        f"Policies: {result['routing']} (routing), {result['ordering']} (ordering), {result['slicing']} (slicing), "
        f"{result['pools']} (pools).",
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


def _curves(result: dict[str, Any]) -> list[Section]:
    """Both shares that decide whether a rate is carried, over the rates that the search of each goodput tried."""
    charts: tuple[tuple[str, str, float, str, list[str]], ...] = (
        ("Rounds attained", "attainment", result["attainment_level"], "share that meets both targets", [_CURVES]),
        ("Sessions in time", "sessions_in_time", IN_TIME, "share that ends in time", []),
    )
    found = []
    for title, key, level, label, text in charts if any(layout["curve"] for layout in result["layouts"]) else ():
        series = [each for number, layout in enumerate(result["layouts"]) for each in _curve(layout, key, number)]
        levels, marks = [(level, f"{level:.0%}")], [(result["rate"], "the plan's rate")]
        chart = Chart("sessions per second", label, series, levels, marks)
        found.append(Section(f"{title} over the session rate", text=text, chart=chart, is_half=True))
    return found


def _curve(layout: dict[str, Any], key: str, number: int) -> Iterator[Series]:
    """The simulations that ran to their end, joined, and those that were stopped, as points."""
    for is_most in (False, True):
        points = [each for each in layout["curve"] if each["is_most"] is is_most]
        x, y, carried = ([each[name] for each in points] for name in ("rate", key, "carries"))
        name = layout_label(layout) + (", stopped" if is_most else "")
        if points:
            yield Series(name, x, y, "points" if is_most else "line", number, carried)


def _pareto(result: dict[str, Any]) -> Iterator[Section]:
    """Throughput of a GPU against the speed that a user sees, of everything that was tried."""
    if not (tried := result["series"]["tried"]):
        return
    best = layout_label(result["layouts"][0])
    carried = [each for each in tried if each["carries"]]
    series = [_front(carried)] if carried else []
    for number, (name, points) in enumerate(
        [
            (best, [each for each in tried if each["layout"] == best]),
            ("other layouts", [each for each in tried if each["layout"] != best]),
        ]
    ):
        if points:
            x, y = ([each[key] for each in points] for key in ("tokens_per_s_per_user", "tokens_per_s_per_gpu"))
            notes = [f"{each['layout']} at {each['rate']:.3g}/s" for each in points]
            series.append(Series(name, x, y, "points", 0 if not number else 7, [p["carries"] for p in points], notes))
    chart = Chart("output tokens per second and user", "output tokens per second and GPU", series, height=320)
    yield Section("Throughput against speed", text=[_PARETO], chart=chart)


def _front(points: Sequence[dict[str, Any]]) -> Series:
    """The points that no other one beats in both, from the fastest answers to the highest throughput."""
    front: list[tuple[float, float]] = []
    for each in sorted(points, key=lambda each: (-each["tokens_per_s_per_user"], -each["tokens_per_s_per_gpu"])):
        place = each["tokens_per_s_per_user"], each["tokens_per_s_per_gpu"]
        if not front or place[1] > front[-1][1]:
            front.append(place)
    front.reverse()
    return Series("best of both", [x for x, _ in front], [y for _, y in front], "line", 2)


# -- ampd simulate: attainment over the rate, and the runs at one rate beside each other


def write_simulation_report(path: Path, whole: dict[str, Any]) -> None:
    """Write the report of all combinations, from the object of `--json`. Raises `RunError` if it cannot be written."""
    rate, shown = _at_one_rate(whole["results"])
    rows = [_row(result) for result in whole["results"]]
    sections = [
        Section("Results", head=_HEAD, rows=rows),
        *_attainments(whole["results"]),
        *run_sections(shown),
        *_workers(shown),
    ]
    model, slo = whole["performance_model"], whole["results"][0]["slo"]
    lead = (
        f"{whole['trace']}, seed {whole['seed']}; {model['model']} on {model['gpu']} ({model['kind']} performance "
        f"model); targets TTFT {slo['ttft'] * 1e3:g} ms, ITL {slo['itl'] * 1e3:g} ms"
        f"{f'; figures and charts are of {rate:g} sessions/s' if rate else ''}. Simulated, not measured: "
        "a round is attained if the performance model predicts its first token and the mean gap of the others within "
        f"the targets.{' ' + whole['note'] if whole['note'] else ''}"
    )
    first = next(iter(shown.values()))
    write_page(path, "Simulation", lead, sections, tiles(first) if len(whole["results"]) == 1 else ())


_HEAD = ("", "rate", "cluster", "rounds attained", "sessions", "TTFT P95", "ITL P95", "local", "KV lost", "errors")


def _row(result: dict[str, Any]) -> list[str]:
    reached = result["attainment"]
    return [
        result["label"],
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


def _at_one_rate(results: Sequence[dict[str, Any]]) -> tuple[float | None, dict[str, dict[str, Any]]]:
    """The middle rate and its results by label. Latencies of several rates in one chart would hide each other."""
    rates = sorted({result["rate"] or 0.0 for result in results})
    rate = rates[len(rates) // 2]
    return rate or None, {result["label"]: result for result in results if (result["rate"] or 0.0) == rate}


def _attainments(results: Sequence[dict[str, Any]]) -> Iterator[Section]:
    """Attainment over the rate, if several rates were simulated."""
    if len({result["rate"] for result in results}) < 2:
        return
    for what in ("rounds", "sessions"):
        lines: dict[str, list[tuple[float, float]]] = {}
        for result in results:
            lines.setdefault(result["label"], []).append((result["rate"] or 0.0, result["attainment"][what] or 0.0))
        series = [
            Series(label, [x for x, _ in sorted(points)], [y for _, y in sorted(points)], *line_style(number))
            for number, (label, points) in enumerate(lines.items())
        ]
        label = "share that meets both targets"
        chart = Chart("sessions per second", label, series, [(ATTAINMENT, f"{ATTAINMENT:.0%}")], y_range=(0, 1.02))
        yield Section(f"Attainment of {what} over the session rate", chart=chart, is_half=True)


def _workers(shown: dict[str, dict[str, Any]]) -> Iterator[Section]:
    """How busy the workers of the first combination were."""
    name, result = next(iter(shown.items()))
    rows = [
        [
            each["worker"],
            *(format_share(each[kind], 0) for kind in ("prefill", "decode")),
            format_share(max(1 - each["prefill"] - each["decode"], 0.0), 0),
        ]
        for each in result["workers"][:_MOST_WORKERS]
    ]
    left = len(result["workers"]) - len(rows)
    text = ["Shares of the whole run; a mixed pass counts as prefill. --timeline has every activity with its time."]
    text += [f"{left} more are not listed."] if left else []
    head = ("worker", "prefill", "decode", "idle")
    yield Section(f"How busy the workers were: {name}", text=text, head=head, rows=rows, is_half=True)
