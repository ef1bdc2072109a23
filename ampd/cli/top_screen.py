"""Draws a snapshot as lines of text for a terminal of any width and height. The text is the same without colours.

Only values that miss their target are coloured. An exclamation mark shows the same without colours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from math import log
from typing import Any

from rich.cells import set_cell_size
from rich.console import Console, Group
from rich.text import Text

from ampd.serving.kv_tiers import TIERS
from ampd.types import ATTAINMENT

Row = Mapping[str, Any]
"""A part of a snapshot, with the keys of docs/top.md#json. Values are None where nothing was measured."""

# -- short text for numbers in narrow columns

NOTHING = "-"


def seconds(value_s: float | None) -> str:
    """A duration in at most 6 characters: `0.4ms`, `812ms`, `1.23s`, `45.6s`, `312s`, `2.5h`."""
    if value_s is None:
        return NOTHING
    if value_s <= 0:
        return "0s"
    if value_s < 0.00995:
        return f"{value_s * 1e3:.1f}ms"
    if value_s < 0.9995:
        return f"{value_s * 1e3:.0f}ms"
    for limit_s, digits in ((9.995, 2), (99.95, 1), (9999.5, 0)):
        if value_s < limit_s:
            return f"{value_s:.{digits}f}s"
    hours = value_s / 3600
    return f"{hours:.1f}h" if hours < 999.95 else f"{min(hours, 99999):.0f}h"


def age(value_s: float) -> str:
    """A duration in at most 4 characters: `0.3s`, `12s`, `5m`, `2h`."""
    value_s = max(value_s, 0.0)
    if value_s < 9.95:
        return f"{value_s:.1f}s"
    for limit, unit in ((100, 1), (100 * 60, 60), (1000 * 3600, 3600)):
        if value_s < limit - unit / 2:
            return f"{value_s / unit:.0f}{'s' if unit == 1 else 'm' if unit == 60 else 'h'}"
    return ">41d"


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


def rate(value: float | None) -> str:
    """A number per second, with one decimal below 100."""
    return f"{value:.1f}" if value is not None and value < 99.95 else count(value)


def percent(share: float | None) -> str:
    """A share in at most 6 characters: `94.2%`, `100.0%`; never rounded up to all."""
    if share is None:
        return NOTHING
    return f"{share:.1%}" if share >= 1 or share < 0.9995 else "99.9%"


def bar(share: float, width: int) -> str:
    """A share as a bar of `width` characters."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)


def printable(text: str) -> str:
    """Text from clients or from the state, without control characters that could move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


# -- tables with columns of fixed width. If a table is wider than the terminal, it drops the least important columns

MISSED = "bold red"
QUIET = "dim"


@dataclass(frozen=True, slots=True)
class Cell:
    """The text of one field; `is_missed`: it misses its target."""

    text: str
    is_missed: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        width: in characters.
        keep: columns with higher numbers stay longer when the terminal is narrow.
        cell: the field of a row.
        is_left: the text is aligned to the left.
    """

    title: str
    width: int
    keep: int
    cell: Callable[[Row], Cell | str]
    is_left: bool = False


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit into `width`; the first one always stays."""
    kept = list(columns)
    while len(kept) > 1 and sum(column.width + 1 for column in kept) - 1 > width:
        kept.remove(min(kept[1:], key=lambda column: column.keep))
    return kept


def table(columns: Sequence[Column], rows: Iterable[Row], width: int) -> list[Text]:
    """A heading and one line per row, each at most `width` wide; nothing without rows."""
    kept = fitting(columns, width)
    lines = [_line(kept, [column.cell(row) for column in kept], width, Text()) for row in rows]
    heading = _line(kept, [column.title for column in kept], width, Text(style=QUIET))
    return [heading, *lines] if lines else []


def clipped(text: Text, width: int) -> Text:
    """The line, with an ellipsis at its end if it was wider than `width`."""
    text.truncate(max(width, 1), overflow="ellipsis")
    return text


def _line(columns: Sequence[Column], cells: Iterable[Cell | str], width: int, line: Text) -> Text:
    for column, content in zip(columns, cells, strict=True):
        cell = Cell(content) if isinstance(content, str) else content
        line.append(" " if column is not columns[0] else "")
        line.append(_padded(printable(cell.text), column), style=MISSED if cell.is_missed else None)
    line.rstrip()
    return clipped(line, width)


def _padded(text: str, column: Column) -> str:
    shown = clipped(Text(text), column.width)
    if column.is_left:
        return set_cell_size(shown.plain, column.width)
    return " " * (column.width - shown.cell_len) + shown.plain


_BAR = 4
_SHORT_ID = 8
_FEWEST_ROWS = 2
_LONGEST_SESSION_ID = 9


def as_text(snapshot: Row, width: int, *, colours: bool = False) -> str:
    """The whole snapshot as text, each line at most `width` wide."""
    console = Console(
        file=StringIO(), width=width, height=1000, force_terminal=colours, no_color=not colours, legacy_windows=False
    )
    with console.capture() as captured:
        for line in lines(snapshot, width):
            console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)
    return captured.get()


def screen(snapshot: Row, width: int, height: int, last_line: str = "") -> Group:
    """The content of a terminal of this size, with `last_line` at its end."""
    shown = lines(snapshot, width, height - 1)[: height - 1]
    return Group(*shown, clipped(Text(printable(last_line), style=QUIET), width))


def lines(snapshot: Row, width: int, height: int | None = None) -> list[Text]:
    """The view, line by line. With a `height`, the longest lists are shortened until it fits."""
    short = _short_ids([row["worker_id"] for row in snapshot["workers"]])
    fixed = [*_head(snapshot, width), Text(), *_latencies(snapshot, width)]
    tables = [
        _coordinators(snapshot["coordinators"], width),
        _workers(snapshot, short, width),
        _kv(snapshot, short, width),
        _routes(snapshot["window"], width),
        _sessions(snapshot, short, width),
    ]
    tables = [part for part in tables if part]
    if height is not None:
        tables = _cut(tables, height - len(fixed) - len(tables), width)
    return [*fixed, *(line for part in tables for line in (Text(), *part))]


def _cut(tables: list[list[Text]], room: int, width: int) -> list[list[Text]]:
    """The tables with the longest ones shortened, each with a line that counts the hidden rows."""
    kept = [len(part) for part in tables]
    while sum(kept) > room and max(kept, default=0) > _FEWEST_ROWS + 1:
        kept[kept.index(max(kept))] -= 1
    return [
        part if rows == len(part) else [*part[: rows - 1], _more(len(part) - rows + 1, width)]
        for part, rows in zip(tables, kept, strict=True)
    ]


def _more(hidden: int, width: int) -> Text:
    return clipped(Text(f"... {hidden} more (--once prints all)", style=QUIET), width)


# -- the head


def _head(snapshot: Row, width: int) -> list[Text]:
    window, time = snapshot["window"], snapshot["taken_at"][11:19] or snapshot["taken_at"]
    title = Text("ampd top", style="bold").append(
        f"  {printable(snapshot['namespace'])}  {printable(time)} UTC  {age(snapshot['oldest_word_s'])} old"
        f"  {printable(snapshot['state'])}{_predicted_by(snapshot)}",
        style="default",
    )
    head = [title, *(Text(printable(note), style=MISSED) for note in snapshot["notes"])]
    if snapshot["coordinators"]:
        running = sum(row["rounds_in_progress"] for row in snapshot["coordinators"])
        head.append(
            Text(
                f"last {seconds(min(window['span_s'], window['length_s']))}: {count(window['rounds'])} rounds, "
                f"{rate(window['rounds_per_s'])}/s, {rate(window['output_tokens_per_s'])} tokens/s out; "
                f"{count(running)} in progress{_refused(window)}"
            )
        )
    if window["rounds"]:
        head.append(_attainment(window))
    return [clipped(line, width) for line in head]


def _predicted_by(snapshot: Row) -> str:
    name = snapshot["performance_model"]
    return f"  times of {printable(name)}" if name else ""


def _refused(window: Row) -> str:
    return f", {count(window['refused'])} refused because of load" if window["refused"] else ""


def _attainment(window: Row) -> Text:
    shares = window["attainment"]
    cell = _attained(shares["rounds"])
    line = Text("attainment ").append(cell.text, style=MISSED if cell.is_missed else "bold")
    line.append(f" (TTFT {percent(shares['ttft'])}, ITL {percent(shares['itl'])}); ")
    return _append_bad(line, f"{count(window['errors'])} failed", window["errors"]).append(
        f", {count(window['abandoned'])} abandoned"
    )


def _latencies(snapshot: Row, width: int) -> list[Text]:
    window, (ttft_s, itl_s) = snapshot["window"], _targets(snapshot)
    rows = [
        {"name": "TTFT initial", "target": ttft_s, **window["ttft_initial_s"]},
        {"name": "TTFT incremental", "target": ttft_s, **window["ttft_incremental_s"]},
        {"name": "ITL", "target": itl_s, **window["itl_s"]},
    ]
    columns = [
        Column("", 16, 9, lambda row: row["name"], is_left=True),
        Column("target", 7, 8, lambda row: seconds(row["target"])),
        Column("mean", 7, 5, lambda row: _late(row["mean"], row["target"])),
        Column("p50", 7, 4, lambda row: _late(row["p50"], row["target"])),
        Column("p95", 7, 7, lambda row: _late(row["p95"], row["target"])),
        Column("p99", 7, 6, lambda row: _late(row["p99"], row["target"])),
        Column("rounds", 6, 3, lambda row: count(row["count"])),
    ]
    return table(columns, rows, width)


# -- lists


def _coordinators(rows: Sequence[Row], width: int) -> list[Text]:
    short = _short_ids([row["coordinator_id"] for row in rows])
    columns = [
        Column("coordinator", max(11, _widest(short)), 9, lambda row: short[row["coordinator_id"]], is_left=True),
        Column("rounds", 6, 8, lambda row: count(row["rounds"])),
        Column("now", 4, 6, lambda row: count(row["rounds_in_progress"])),
        Column("attained", 8, 7, lambda row: _attained(row["attainment"])),
        Column("local", 6, 5, lambda row: percent(row["local_share"])),
        Column("leads", 5, 3, lambda row: "yes" if row["is_leading"] else "-"),
        Column("state", 8, 4, _connection),
        Column("age", 4, 2, lambda row: age(row["age_s"])),
        Column(
            "routing / binding / pools",
            max(width - 60, 25),
            1,
            lambda row: f"{row['routing']} / {row['binding']} / {row['pools']}",
            is_left=True,
        ),
    ]
    return table(columns, rows, width)


def _connection(row: Row) -> Cell:
    if not row["is_state_heard"]:
        return _marked("lost", True)
    return Cell(f"{row['state_losses']} lost" if row["state_losses"] else "ok")


def _workers(snapshot: Row, short: dict[str, str], width: int) -> list[Text]:
    rows, (ttft_s, itl_s) = snapshot["workers"], _targets(snapshot)
    wait = Column("wait", 6, 96, lambda row: seconds(row["queue_wait_s"]))
    tokens = Column("tokens", 6, 96, lambda row: count(row["queue_tokens"]))
    columns = [
        Column("worker", _widest(short), 99, lambda row: short[row["worker_id"]], is_left=True),
        Column("role", 7, 98, lambda row: row["role"], is_left=True),
        Column("TP", 2, 30, lambda row: str(row["tp"])),
        Column("times", 5, 25, _time_factor),
        Column("queue", 5, 97, lambda row: count(row["queue_prefills"])),
        wait if any(row["queue_wait_s"] is not None for row in rows) else tokens,
        Column("oldest", 6, 20, lambda row: seconds(row["oldest_wait_s"])),
        Column("TTFT", 7, 95, lambda row: _late(row["ttft_s"], ttft_s)),
        Column("ITL", 7, 94, lambda row: _late(row["itl_s"], itl_s)),
        Column("batch", 5, 80, lambda row: count(row["decode_batch"])),
        Column("ctx", 5, 50, lambda row: count(row["decode_context_tokens"])),
        Column("KV", _BAR + 5, 90, _used_kv),
        Column("KV tokens", 11, 10, lambda row: f"{count(row['kv_used_tokens'])}/{count(row['kv_capacity_tokens'])}"),
        Column("held", 4, 70, lambda row: count(row["sessions_held"])),
        Column("age", 4, 40, lambda row: age(row["age_s"])),
    ]
    return table(columns, rows, width)


def _time_factor(row: Row) -> str:
    """The factor that is farthest from 1."""
    return f"x{max(row['time_factors'].values(), key=lambda factor: abs(log(factor))):.2f}"


def _used_kv(row: Row) -> str:
    if row["kv_capacity_tokens"] <= 0:
        return "-"
    share = row["kv_used_tokens"] / row["kv_capacity_tokens"]
    return f"{bar(share, _BAR)} {min(share, 9.99):>4.0%}"


def _kv(snapshot: Row, short: dict[str, str], width: int) -> list[Text]:
    """Where the KV of the last minute came from: of all workers, and of each."""
    rows = [{"name": short[row["worker_id"]], **row} for row in snapshot["workers"]]
    if not any(row["store_capacity_tokens"] or any(row["hit_tokens"].values()) for row in rows):
        return []
    columns = [
        Column("KV hits", max(_widest(short), 7), 99, lambda row: row["name"], is_left=True),
        *(_tier(name, keep) for name, keep in zip(TIERS, (95, 98, 97, 96), strict=True)),
        Column("reloads", 7, 60, lambda row: count(row["reload_s"]["count"])),
        Column("reload", 6, 94, lambda row: seconds(row["reload_s"]["mean"])),
        Column("evicted", 7, 93, lambda row: count(row["evicted_tokens"])),
        Column("in use", 6, 80, _used_store),
        Column("store size", 10, 70, lambda row: count(row["store_capacity_tokens"] or None)),
    ]
    return table(columns, [{"name": "all", **snapshot["kv"]}, *rows], width)


def _tier(name: str, keep: int) -> Column:
    return Column(name, max(len(name), 6), keep, lambda row: count(row["hit_tokens"][name]))


def _used_store(row: Row) -> str:
    capacity_tokens = row["store_capacity_tokens"]
    return f"{min(row['store_used_tokens'] / capacity_tokens, 9.99):.0%}" if capacity_tokens else "-"


def _routes(window: Row, width: int) -> list[Text]:
    columns = [
        Column("route", 6, 9, lambda row: row["route"], is_left=True),
        Column("reason", 30, 8, lambda row: row["reason"], is_left=True),
        Column("rounds", 6, 7, lambda row: count(row["rounds"])),
        Column("share", 6, 6, lambda row: percent(row["rounds"] / max(window["rounds"], 1))),
    ]
    return table(columns, window["reasons"], width)


def _sessions(snapshot: Row, short: dict[str, str], width: int) -> list[Text]:
    sessions, window = snapshot["sessions"], snapshot["window"]
    if not (sessions["held"] or window["sessions_bound"] or window["unnamed"]):
        return []
    line = Text(
        f"sessions: {count(sessions['held'])} held by decode workers ({count(sessions['tokens'])} tokens); "
        f"{count(window['sessions_bound'])} bound, "
    )
    line = _append_bad(line, f"{count(window['sessions_repinned'])} moved", window["sessions_repinned"])
    shown = [line]
    if window["unnamed"]:
        shown.append(
            Text(f"{count(window['unnamed'])} rounds without a session, which have no affinity and no history")
        )
    if worst := sessions["worst_breaking"]:
        listed = ", ".join(
            f"{_shortened(row['session_id'])} at token {count(row['at_tokens'])} of {count(row['of_tokens'])}"
            for row in worst
        )
        line = _append_bad(Text("prefix breaks in every round: "), count(sessions["breaking"]), sessions["breaking"])
        shown.append(line.append(printable(f" sessions; {listed}")))
    largest = [
        f"{_shortened(row['session_id'])} {count(row['tokens'])} on {short[row['worker_id']]}"
        for row in sessions["largest"]
    ]
    if largest:
        shown.append(Text(printable(f"largest: {', '.join(largest)}")))
    return [clipped(line, width) for line in shown]


def _shortened(session_id: str) -> str:
    return session_id if len(session_id) <= _LONGEST_SESSION_ID else session_id[: _LONGEST_SESSION_ID - 1] + "…"


def _short_ids(ids: Sequence[str]) -> dict[str, str]:
    """Each id's shortest distinct prefix, at least eight characters long."""
    length = _SHORT_ID
    while len({whole[:length] for whole in ids}) < len(set(ids)):
        length += 1
    return {whole: whole[:length] for whole in ids}


def _widest(short_ids: dict[str, str]) -> int:
    return max(map(len, short_ids.values()), default=0)


# -- marks


def _targets(snapshot: Row) -> tuple[float | None, float | None]:
    """The mean targets of the window's rounds, by which attainment counts; without rounds, the coordinators' own."""
    used, default = snapshot["window"]["targets"], snapshot["slo"] or {"ttft_s": None, "itl_s": None}
    return used["ttft_s"] or default["ttft_s"], used["itl_s"] or default["itl_s"]


def _late(value_s: float | None, target_s: float | None) -> Cell:
    return _marked(seconds(value_s), value_s is not None and target_s is not None and value_s > target_s)


def _attained(share: float | None) -> Cell:
    return _marked(percent(share), share is not None and share < ATTAINMENT)


def _marked(text: str, is_missed: bool) -> Cell:
    return Cell(f"{text}!" if is_missed else text, is_missed)


def _append_bad(line: Text, text: str, number: int) -> Text:
    """Append a count that should be zero."""
    cell = _marked(text, bool(number))
    return line.append(cell.text, style=MISSED if cell.is_missed else None)
