"""Draws a snapshot as text for a terminal. The text is the same without colours.

Only values that miss their target are coloured. An exclamation mark shows the same without colours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from io import StringIO
from math import log
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampd.serving.kv_tiers import TIERS
from ampd.types import ATTAINMENT

Row = Mapping[str, Any]
"""A part of a snapshot, with the keys of docs/top.md#json. Values are None where nothing was measured."""

MISSED = "bold red"
NOTHING = "-"
_SHORT_ID = 8

# -- short text for numbers in narrow columns


def seconds(value_s: float | None) -> str:
    """A duration in at most 6 characters: `0.4ms`, `812ms`, `1.23s`, `45.6s`, `312s`, `2.5h`."""
    if value_s is None:
        return NOTHING
    if value_s < 0.9995:
        return f"{value_s * 1e3:.{int(value_s < 0.00995)}f}ms"
    for limit_s, digits in ((9.995, 2), (99.95, 1), (9999.5, 0)):
        if value_s < limit_s:
            return f"{value_s:.{digits}f}s"
    return f"{min(value_s / 3600, 9999):.{int(value_s < 3.6e6)}f}h"


def count(value: float | None) -> str:
    """A number in at most 5 characters: `9999`, `12.3k`, `1.2M`, `345G`."""
    if value is None:
        return NOTHING
    if abs(value) < 9999.5:
        return f"{value:.0f}"
    for limit, unit in ((1e6, "k"), (1e9, "M"), (1e12, "G"), (1e15, "T")):
        if value < limit * 0.9995:
            scaled = value / (limit / 1e3)
            return f"{scaled:.1f}{unit}" if scaled < 99.95 else f"{scaled:.0f}{unit}"
    return "lots"


def percent(share: float | None) -> str:
    """A share in at most 6 characters: `94.2%`, `100.0%`; never rounded up to all."""
    if share is None:
        return NOTHING
    return f"{share:.1%}" if share >= 1 or share < 0.9995 else "99.9%"


def printable(text: str) -> str:
    """Text from clients or from the state, without control characters that could move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


# -- the page


def as_text(snapshot: Row, width: int, *, colours: bool = False) -> str:
    """The whole snapshot as text, each line at most `width` wide."""
    console = Console(
        file=StringIO(), width=width, height=1000, force_terminal=colours, no_color=not colours, legacy_windows=False
    )
    with console.capture() as captured:
        console.print(page(snapshot))
    return "\n".join(line.rstrip() for line in captured.get().split("\n"))


def page(snapshot: Row, hint: str = "") -> Group:
    """What a terminal shows; `hint`: behind the name of the command."""
    short = _short_ids([row["worker_id"] for row in snapshot["workers"]])
    tables: list[Table | Text | None] = [
        _latencies(snapshot),
        _coordinators(snapshot["coordinators"]),
        _workers(snapshot, short),
        _kv(snapshot, short),
        _routes(snapshot["window"]),
        _sessions(snapshot, short),
    ]
    parts: list[RenderableType] = [*_head(snapshot, hint)]
    for table in tables:
        if table is not None:
            parts.append("")
            parts.append(table)
    return Group(*parts)


def _head(snapshot: Row, hint: str) -> Iterator[Text]:
    window, time = snapshot["window"], snapshot["taken_at"][11:19]
    model = f"  times of {snapshot['performance_model']}" if snapshot["performance_model"] else ""
    yield _line(
        f"ampd top{hint}  {snapshot['namespace']}  {time} UTC  {seconds(snapshot['oldest_word_s'])} old  "
        f"{snapshot['state']}{model}"
    )
    for note in snapshot["notes"]:
        yield _line(note, style=MISSED)
    if snapshot["coordinators"]:
        running = sum(row["rounds_in_progress"] for row in snapshot["coordinators"])
        refused = f", {count(window['refused'])} refused because of load" if window["refused"] else ""
        span_s, tokens_per_s = min(window["span_s"], window["length_s"]), window["output_tokens_per_s"]
        yield _line(
            f"last {seconds(span_s)}: {count(window['rounds'])} rounds, {window['rounds_per_s'] or 0:.1f}/s, "
            f"{count(tokens_per_s)} tokens/s out; {count(running)} in progress{refused}"
        )
    if window["rounds"]:
        shares = window["attainment"]
        yield (
            _line("attainment ")
            .append_text(_attained(shares["rounds"]))
            .append(f" (TTFT {percent(shares['ttft'])}, ITL {percent(shares['itl'])}); ")
            .append_text(_bad(window["errors"], "failed"))
            .append(f", {count(window['abandoned'])} abandoned")
        )


# -- tables: a title, and how a row's cell is made

_POLICIES = "policies"
"""The only column that a narrow terminal wraps."""
_Columns = Sequence[tuple[str, Callable[[Row], str | Text]]]


def _table(columns: _Columns, rows: Sequence[Row], left: int = 1) -> Table | None:
    """None without rows. `left`: how many of the first columns hold words, which begin at the left."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for number, (title, _) in enumerate(columns):
        table.add_column(title, justify="left" if number < left else "right", no_wrap=title != _POLICIES)
    for row in rows:
        table.add_row(*(Text.assemble(cell(row)) for _, cell in columns))
    return table if rows else None


def _latencies(snapshot: Row) -> Table | None:
    window, (ttft_s, itl_s) = snapshot["window"], _targets(snapshot)
    rows = [
        {"name": "TTFT initial", "target": ttft_s, **window["ttft_initial_s"]},
        {"name": "TTFT incremental", "target": ttft_s, **window["ttft_incremental_s"]},
        {"name": "ITL", "target": itl_s, **window["itl_s"]},
    ]
    columns: _Columns = [
        ("", lambda row: row["name"]),
        ("target", lambda row: seconds(row["target"])),
        *((name, lambda row, name=name: _late(row[name], row["target"])) for name in ("mean", "p50", "p95", "p99")),
        ("rounds", lambda row: count(row["count"])),
    ]
    return _table(columns, rows)


def _coordinators(rows: Sequence[Row]) -> Table | None:
    short = _short_ids([row["coordinator_id"] for row in rows])
    columns: _Columns = [
        ("coordinator", lambda row: printable(short[row["coordinator_id"]])),
        ("rounds", lambda row: count(row["rounds"])),
        ("now", lambda row: count(row["rounds_in_progress"])),
        ("attained", lambda row: _attained(row["attainment"])),
        ("local", lambda row: percent(row["local_share"])),
        ("leads", lambda row: "yes" if row["is_leading"] else NOTHING),
        ("state", _connection),
        ("age", lambda row: seconds(row["age_s"])),
        (_POLICIES, lambda row: printable(f"{row['routing']} / {row['binding']} / {row['pools']}")),
    ]
    return _table(columns, rows)


def _connection(row: Row) -> Text:
    if not row["is_state_heard"]:
        return _marked("lost", True)
    return Text(f"{row['state_losses']} lost" if row["state_losses"] else "ok")


def _workers(snapshot: Row, short: Mapping[str, str]) -> Table | None:
    rows, (ttft_s, itl_s) = snapshot["workers"], _targets(snapshot)
    is_predicted = any(row["queue_wait_s"] is not None for row in rows)
    columns: _Columns = [
        ("worker", lambda row: printable(short[row["worker_id"]])),
        ("role", lambda row: row["role"]),
        ("times", _time_factor),
        ("queue", lambda row: count(row["queue_prefills"])),
        ("wait", lambda row: seconds(row["queue_wait_s"]))
        if is_predicted
        else ("tokens", lambda row: count(row["queue_tokens"])),
        ("oldest", lambda row: seconds(row["oldest_wait_s"])),
        ("TTFT", lambda row: _late(row["ttft_s"], ttft_s)),
        ("ITL", lambda row: _late(row["itl_s"], itl_s)),
        ("batch", lambda row: count(row["decode_batch"])),
        ("ctx", lambda row: count(row["decode_context_tokens"])),
        ("KV", lambda row: _used(row["kv_used_tokens"], row["kv_capacity_tokens"])),
        ("held", lambda row: count(row["sessions_held"])),
        ("age", lambda row: seconds(row["age_s"])),
    ]
    return _table(columns, rows, left=2)


def _time_factor(row: Row) -> str:
    """The factor that is farthest from 1."""
    return f"x{max(row['time_factors'].values(), key=lambda factor: abs(log(factor))):.2f}"


def _used(tokens: int, capacity_tokens: int) -> str:
    return f"{min(tokens / capacity_tokens, 9.99):.0%}" if capacity_tokens > 0 else NOTHING


def _kv(snapshot: Row, short: Mapping[str, str]) -> Table | None:
    """Where the KV of the last minute came from: of all workers, and of each."""
    rows = [{"name": printable(short[row["worker_id"]]), **row} for row in snapshot["workers"]]
    if not any(row["store_capacity_tokens"] or any(row["hit_tokens"].values()) for row in rows):
        return None
    columns: _Columns = [
        ("KV hits", lambda row: row["name"]),
        *((name, lambda row, name=name: count(row["hit_tokens"][name])) for name in TIERS),
        ("reload", lambda row: seconds(row["reload_s"]["mean"])),
        ("evicted", lambda row: count(row["evicted_tokens"])),
        ("in use", lambda row: _used(row["store_used_tokens"], row["store_capacity_tokens"])),
    ]
    return _table(columns, [{"name": "all", **snapshot["kv"]}, *rows])


def _routes(window: Row) -> Table | None:
    columns: _Columns = [
        ("route", lambda row: row["route"]),
        ("reason", lambda row: printable(row["reason"])),
        ("rounds", lambda row: count(row["rounds"])),
        ("share", lambda row: percent(row["rounds"] / max(window["rounds"], 1))),
    ]
    return _table(columns, window["reasons"], left=2)


def _sessions(snapshot: Row, short: Mapping[str, str]) -> Text | None:
    sessions, window = snapshot["sessions"], snapshot["window"]
    if not (sessions["held"] or window["sessions_bound"] or window["unnamed"]):
        return None
    text = Text(
        f"sessions: {count(sessions['held'])} held by decode workers ({count(sessions['tokens'])} tokens); "
        f"{count(window['sessions_bound'])} bound, "
    ).append_text(_bad(window["sessions_repinned"], "moved"))
    if window["unnamed"]:
        text.append(f"\n{count(window['unnamed'])} rounds without a session, which have no affinity and no history")
    if worst := sessions["worst_breaking"]:
        listed = (
            f"{row['session_id'][:_SHORT_ID]} at token {count(row['at_tokens'])} of {count(row['of_tokens'])}"
            for row in worst
        )
        text.append("\nprefix breaks in every round: ").append_text(_bad(sessions["breaking"], "sessions"))
        text.append(printable(f"; {', '.join(listed)}"))
    largest = (
        f"{row['session_id'][:_SHORT_ID]} {count(row['tokens'])} on {short[row['worker_id']]}"
        for row in sessions["largest"]
    )
    return text.append(f"\nlargest: {printable(', '.join(largest))}" if sessions["largest"] else "")


def _short_ids(ids: Sequence[str]) -> dict[str, str]:
    """Each id's shortest distinct prefix, at least eight characters long."""
    length = _SHORT_ID
    while len({whole[:length] for whole in ids}) < len(set(ids)):
        length += 1
    return {whole: whole[:length] for whole in ids}


# -- marks


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _targets(snapshot: Row) -> tuple[float | None, float | None]:
    """The mean targets of the window's rounds, by which attainment counts; without rounds, the coordinators' own."""
    used, default = snapshot["window"]["targets"], snapshot["slo"] or {"ttft_s": None, "itl_s": None}
    return used["ttft_s"] or default["ttft_s"], used["itl_s"] or default["itl_s"]


def _late(value_s: float | None, target_s: float | None) -> Text:
    return _marked(seconds(value_s), value_s is not None and target_s is not None and value_s > target_s)


def _attained(share: float | None) -> Text:
    return _marked(percent(share), share is not None and share < ATTAINMENT)


def _bad(number: int, what: str) -> Text:
    """A count that should be zero."""
    return _marked(f"{count(number)} {what}", bool(number))


def _marked(text: str, is_missed: bool) -> Text:
    return Text(f"{text}!", style=MISSED) if is_missed else Text(text)
