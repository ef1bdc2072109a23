"""A snapshot as lines of text, for a terminal of any width and height: pure, and the same with and without colours.

Colour marks what misses its target and nothing else; an exclamation mark says the same without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich.console import Console, Group
from rich.text import Text

from ampd.cli.top.snapshot import CoordinatorRow, LatencySummary, Snapshot, WindowRow, WorkerRow
from ampd.cli.top.table import MISSED, QUIET, Cell, Column, clipped, table
from ampd.cli.top.units import age, bar, count, percent, printable, rate, seconds

ATTAINMENT_TARGET = 0.9
"""Below this share attainment is marked: the share that goodput is usually stated for."""

_BAR = 4
_SHORT_ID = 8
_FEWEST_ROWS = 2
_LONGEST_SESSION_ID = 24


def as_text(snapshot: Snapshot, width: int, *, colours: bool = False) -> str:
    """The whole snapshot as text, each line at most `width` wide."""
    console = Console(
        file=StringIO(), width=width, height=1000, force_terminal=colours, no_color=not colours, legacy_windows=False
    )
    with console.capture() as captured:
        for line in lines(snapshot, width):
            console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)
    return captured.get()


def screen(snapshot: Snapshot, width: int, height: int, last_line: str = "") -> Group:
    """What fills a terminal; `last_line` is a word to its reader."""
    shown = lines(snapshot, width, height - 1)[: height - 1]
    return Group(*shown, clipped(Text(printable(last_line), style=QUIET), width))


def lines(snapshot: Snapshot, width: int, height: int | None = None) -> list[Text]:
    """The view, line by line. With a `height`, long lists are cut so that it fits as far as it can."""
    short = _short_ids([row.worker_id for row in snapshot.workers])
    fixed = [*_head(snapshot, width), Text(), *_latencies(snapshot, width)]
    lists = [
        _coordinators(snapshot.coordinators, width),
        _workers(snapshot, short, width),
        _routes(snapshot.window, width),
        _sessions(snapshot, short, width),
    ]
    lists = [one for one in lists if one]
    if height is not None:
        lists = _cut(lists, height - len(fixed) - len(lists), width)
    return [*fixed, *(line for one in lists for line in (Text(), *one))]


def _cut(lists: list[list[Text]], room: int, width: int) -> list[list[Text]]:
    """The lists with the longest ones shortened, each with a line that says by how much."""
    kept = [len(one) for one in lists]
    while sum(kept) > room and max(kept, default=0) > _FEWEST_ROWS + 1:
        kept[kept.index(max(kept))] -= 1
    return [
        one if rows == len(one) else [*one[: rows - 1], _more(len(one) - rows + 1, width)]
        for one, rows in zip(lists, kept, strict=True)
    ]


def _more(hidden: int, width: int) -> Text:
    return clipped(Text(f"... {hidden} more (--once prints all)", style=QUIET), width)


# -- the head


def _head(snapshot: Snapshot, width: int) -> list[Text]:
    window = snapshot.window
    time = snapshot.taken_at[11:19] or snapshot.taken_at
    title = Text("ampd top", style="bold").append(
        f"  {printable(snapshot.namespace)}  {printable(time)} UTC  {age(snapshot.oldest_word_s)} old"
        f"  {printable(snapshot.state)}",
        style="default",
    )
    found = [title, *(Text(printable(note), style=MISSED) for note in snapshot.notes)]
    if snapshot.coordinators:
        found.append(_traffic(snapshot))
    if window.rounds:
        found.append(_attained(window))
    return [clipped(line, width) for line in found]


def _traffic(snapshot: Snapshot) -> Text:
    window = snapshot.window
    running = sum(row.rounds_in_progress for row in snapshot.coordinators)
    span = f"last {seconds(window.span_s)}" if window.span_s < window.length_s else f"last {seconds(window.length_s)}"
    return Text(
        f"{span}: {count(window.rounds)} rounds, {rate(window.rounds_per_s)}/s, "
        f"{rate(window.output_tokens_per_s)} tokens/s out; {count(running)} in progress"
    )


def _attained(window: WindowRow) -> Text:
    one = window.attainment
    line = Text("attainment ")
    cell = _against(percent(one.rounds), one.rounds is not None and one.rounds < ATTAINMENT_TARGET)
    line.append(cell.text, style=MISSED if cell.is_missed else "bold")
    line.append(f" (TTFT {percent(one.ttft)}, ITL {percent(one.itl)})")
    errors = _against(f"{count(window.errors)} failed", bool(window.errors))
    line.append("; ").append(errors.text, style=MISSED if errors.is_missed else None)
    return line.append(f", {count(window.abandoned)} abandoned")


def _latencies(snapshot: Snapshot, width: int) -> list[Text]:
    window, slo = snapshot.window, snapshot.slo
    ttft_s, itl_s = (slo.ttft_s, slo.itl_s) if slo else (None, None)
    columns = [
        Column("", 16, 9, is_left=True),
        Column("target", 7, 8),
        Column("mean", 7, 5),
        Column("p50", 7, 4),
        Column("p95", 7, 7),
        Column("p99", 7, 6),
        Column("rounds", 6, 3),
    ]
    rows = [
        _latency("TTFT initial", window.ttft_initial_s, ttft_s),
        _latency("TTFT incremental", window.ttft_incremental_s, ttft_s),
        _latency("ITL", window.itl_s, itl_s),
    ]
    return table(columns, rows, width)


def _latency(name: str, summary: LatencySummary, target_s: float | None) -> list[Cell]:
    values = (summary.mean, summary.p50, summary.p95, summary.p99)
    cells = [_late(value_s, target_s) for value_s in values]
    return [Cell(name), Cell(seconds(target_s)), *cells, Cell(count(summary.count))]


# -- coordinators


def _coordinators(rows: Sequence[CoordinatorRow], width: int) -> list[Text]:
    if not rows:
        return []
    short = _short_ids([row.coordinator_id for row in rows])
    columns = [
        Column("coordinator", max(11, *map(len, short.values())), 9, is_left=True),
        Column("rounds", 6, 8),
        Column("now", 4, 6),
        Column("attained", 8, 7),
        Column("local", 6, 5),
        Column("leads", 5, 3),
        Column("state", 8, 4),
        Column("age", 4, 2),
        Column("routing / binding / pools", max(width - 60, 25), 1, is_left=True),
    ]
    return table(columns, [_coordinator(row, short) for row in rows], width)


def _coordinator(row: CoordinatorRow, short: dict[str, str]) -> list[Cell]:
    state = "lost" if not row.is_state_heard else f"{row.state_losses} lost" if row.state_losses else "ok"
    return [
        Cell(short[row.coordinator_id]),
        Cell(count(row.rounds)),
        Cell(count(row.rounds_in_progress)),
        _against(percent(row.attainment), row.attainment is not None and row.attainment < ATTAINMENT_TARGET),
        Cell(percent(row.local_share)),
        Cell("yes" if row.is_leading else "-"),
        _against(state, not row.is_state_heard),
        Cell(age(row.age_s)),
        Cell(f"{row.routing} / {row.binding} / {row.pools}"),
    ]


# -- workers


def _workers(snapshot: Snapshot, short: dict[str, str], width: int) -> list[Text]:
    rows = snapshot.workers
    if not rows:
        return []
    lanes = any(row.lane for row in rows)
    predicted = any(row.queue_wait_s is not None for row in rows)
    columns = [
        Column("worker", max(map(len, short.values())), 99, is_left=True),
        Column("role", 7, 98, is_left=True),
        *([Column("lane", 6, 60, is_left=True)] if lanes else []),
        Column("TP", 2, 30),
        Column("queue", 5, 97),
        Column("wait" if predicted else "tokens", 6, 96),
        Column("oldest", 6, 20),
        Column("TTFT", 7, 95),
        Column("ITL", 7, 94),
        Column("batch", 5, 80),
        Column("ctx", 5, 50),
        Column("KV", _BAR + 5, 90),
        Column("KV tokens", 11, 10),
        Column("held", 4, 70),
        Column("age", 4, 40),
    ]
    return table(columns, [_worker(row, snapshot, short, lanes, predicted) for row in rows], width)


def _worker(row: WorkerRow, snapshot: Snapshot, short: dict[str, str], lanes: bool, predicted: bool) -> list[Cell]:
    slo = snapshot.slo
    ttft_s, itl_s = (slo.ttft_s, slo.itl_s) if slo else (None, None)
    return [
        Cell(short[row.worker_id]),
        Cell(row.role),
        *([Cell(row.lane or "-")] if lanes else []),
        Cell(str(row.tp)),
        Cell(count(row.queue_prefills)),
        Cell(seconds(row.queue_wait_s) if predicted else count(row.queue_tokens)),
        Cell(seconds(row.oldest_wait_s)),
        _late(row.ttft_s, ttft_s),
        _late(row.itl_s, itl_s),
        Cell(count(row.decode_batch)),
        Cell(count(row.decode_context_tokens)),
        Cell(_filled(row)),
        Cell(f"{count(row.kv_used_tokens)}/{count(row.kv_capacity_tokens)}"),
        Cell(count(row.sessions_held)),
        Cell(age(row.age_s)),
    ]


def _filled(row: WorkerRow) -> str:
    if row.kv_capacity_tokens <= 0:
        return "-"
    share = row.kv_used_tokens / row.kv_capacity_tokens
    return f"{bar(share, _BAR)} {min(share, 9.99):>4.0%}"


# -- routes and sessions


def _routes(window: WindowRow, width: int) -> list[Text]:
    if not window.reasons:
        return []
    columns = [
        Column("route", 6, 9, is_left=True),
        Column("reason", 30, 8, is_left=True),
        Column("rounds", 6, 7),
        Column("share", 6, 6),
    ]
    rows = [
        [Cell(one.route), Cell(one.reason), Cell(count(one.rounds)), Cell(percent(one.rounds / max(window.rounds, 1)))]
        for one in window.reasons
    ]
    return table(columns, rows, width)


def _sessions(snapshot: Snapshot, short: dict[str, str], width: int) -> list[Text]:
    sessions, window = snapshot.sessions, snapshot.window
    if not (sessions.held or window.sessions_bound):
        return []
    line = Text(
        f"sessions: {count(sessions.held)} held by decode workers ({count(sessions.tokens)} tokens); "
        f"{count(window.sessions_bound)} bound, "
    )
    moved = _against(f"{count(window.sessions_repinned)} moved", bool(window.sessions_repinned))
    found = [line.append(moved.text, style=MISSED if moved.is_missed else None)]
    if sessions.largest:
        largest = ", ".join(
            f"{_shortened(one.session_id)} {count(one.tokens)} on {short[one.worker_id]}" for one in sessions.largest
        )
        found.append(Text(printable(f"largest: {largest}")))
    return [clipped(one, width) for one in found]


def _shortened(session_id: str) -> str:
    return session_id if len(session_id) <= _LONGEST_SESSION_ID else session_id[: _LONGEST_SESSION_ID - 1] + "…"


# -- marks


def _late(value_s: float | None, target_s: float | None) -> Cell:
    return _against(seconds(value_s), value_s is not None and target_s is not None and value_s > target_s)


def _against(text: str, is_missed: bool) -> Cell:
    return Cell(f"{text}!" if is_missed else text, is_missed)


def _short_ids(ids: Sequence[str]) -> dict[str, str]:
    """As much of each id as tells them apart, eight characters where that is enough."""
    length = _SHORT_ID
    while len({one[:length] for one in ids}) < len(set(ids)):
        length += 1
    return {one: one[:length] for one in ids}
