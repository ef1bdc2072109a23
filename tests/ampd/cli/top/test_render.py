"""A snapshot as text: within any width and height, harmless whatever clients call things, marks on what is missed."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from ampd.cli.top_screen import as_text
from ampd.types import BreakingSession, CoordinatorView, KvWindow, Role, Window, WorkerView
from tests.ampd.cli.top.lab import SLO, snapshot, snapshots, task, window

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.slow
@given(snapshots, st.integers(20, 200))
def test_any_snapshot_fits_any_width(seen: dict[str, Any], width: int) -> None:
    text = as_text(seen, width)
    assert all(cell_len(line) <= width for line in text.split("\n"))
    assert all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.mark.slow
@given(snapshots, st.integers(20, 120))
def test_colours_change_no_letter(seen: dict[str, Any], width: int) -> None:
    plain = ANSI.sub("", as_text(seen, width, colours=True))
    assert [line.rstrip() for line in plain.split("\n")] == as_text(seen, width).split("\n")


BREAKING = BreakingSession("b" * 32, 5, 12, 4_000)


def healthy(
    met: int = 19, itl_s: float = 0.02, ttft_s: float = 0.1, breaking: tuple[BreakingSession, ...] = ()
) -> dict[str, Any]:
    served = window(
        {"met": met, "missed-ttft": 20 - met},
        {"local on-time": 15, "remote fewest-late": 5},
        latencies_s={"ttft_initial": [ttft_s], "itl": [0.02]},
        output_tokens=4000,
        bound=2,
    )
    workers = [
        WorkerView(
            "d" * 16,
            Role.DECODE,
            itl=Window(itl_s, 9),
            held_tokens={"s1": 90},
            kv_capacity_tokens=100,
            store_used_tokens=250,
            store_capacity_tokens=1000,
            kv_window=KvWindow(11, 3200, 46, 7, 810, 5, 0.4),
        ),
        WorkerView("p" * 16, Role.PREFILL, queue=(task(1234),), ttft=Window(ttft_s, 3)),
    ]
    coordinator = CoordinatorView(
        "c" * 16,
        SLO,
        "ampd",
        "least-kv",
        "static",
        window=served,
        breaking=breaking,
        breaking_sessions=2 * len(breaking),
    )
    return snapshot(workers, [coordinator])


def test_everything_that_matters_fits_into_eighty_columns() -> None:
    text = as_text(healthy(), 80)
    for word in ("ampd", "03:04:05", "95.0%", "500ms", "50ms", "dddddddd", "decode", "pppppppp", "prefill", "cccccccc"):
        assert word in text, word
    for word in (
        "queue",
        "tokens",
        "TTFT",
        "ITL",
        "batch",
        "ctx",
        "KV",
        "held",
        "age",
        "on-time",
        "fewest-late",
        "75.0%",
    ):
        assert word in text, word
    assert "1234" in text
    assert "…" not in text


def test_the_marks_go_by_the_targets_of_the_rounds() -> None:
    late = {"ttft_initial": [0.2]}
    strict = window({"met": 2}, latencies_s=late, ttft_targets_us=100_000, itl_targets_us=100_000)
    for served, target, marked in ((strict, "50ms", True), (window({"met": 2}, latencies_s=late), "500ms", False)):
        text = as_text(snapshot([], [CoordinatorView("c", SLO, window=served)]), 100)
        (line,) = [line for line in text.splitlines() if line.startswith("TTFT initial")]
        assert (line.split()[2], "200ms!" in line) == (target, marked)


@pytest.mark.parametrize(
    ("seen", "marks"),
    [
        (healthy(), []),
        (healthy(met=17), ["85.0%!", "85.0%!"]),
        (healthy(itl_s=0.06), ["60ms!"]),
        (healthy(ttft_s=0.6), ["600ms!"] * 5),
    ],
)
def test_what_misses_its_target_is_marked_and_nothing_else(seen: dict[str, Any], marks: list[str]) -> None:
    assert re.findall(r"\S+!", re.sub(r"59\dms|60[0-6]ms", "600ms", as_text(seen, 100))) == marks
    # in red too, and nothing else is
    assert as_text(seen, 100, colours=True).count("\x1b[1;31m") == len(marks)


def test_the_kv_of_all_workers_and_of_each_fits_into_eighty_columns() -> None:
    heading, of_all, decode, prefill = as_text(healthy(), 80).split("\n\n")[4].splitlines()
    titles = "device store peer recomputed reload evicted in use"
    assert heading.split() == ["KV", "hits", *titles.split()]
    assert of_all.split() == ["all", "11", "3200", "46", "7", "80ms", "810", "25%"]
    assert decode.split() == ["d" * 8, *of_all.split()[1:]]
    assert prefill.split() == ["p" * 8, *["0"] * 4, "-", "0", "-"]
    assert "KV hits" not in as_text(snapshot([WorkerView("d" * 16, Role.DECODE)], []), 80)


def test_without_a_coordinator_nothing_is_measured_against_anything() -> None:
    seen = healthy()
    workers = [{**row, "ttft_s": 99.0} for row in seen["workers"]]
    assert "!" not in as_text({**seen, "slo": None, "workers": workers}, 80)


def test_a_predicted_wait_replaces_the_tokens() -> None:
    seen = healthy()
    predicted = {**seen, "workers": [{**row, "queue_wait_s": 1.5} for row in seen["workers"]]}
    assert "1.50s" in as_text(predicted, 80)
    assert "1234" not in as_text(predicted, 80)


def test_notes_come_first() -> None:
    assert as_text({**healthy(), "notes": ["something is wrong"]}, 80).split("\n")[1] == "something is wrong"


def test_ids_are_as_long_as_it_takes_to_tell_them_apart() -> None:
    workers = [WorkerView(f"{'a' * 12}{tail}000", Role.DECODE) for tail in "xy"]
    text = as_text(snapshot(workers, []), 80)
    assert "aaaaaaaaaaaax " in text
    assert "aaaaaaaaaaaay " in text


def test_rounds_without_a_session_are_named_at_eighty_columns() -> None:
    for unnamed in (0, 25):
        served = window({"met": 40}, bound=12, unnamed=unnamed)
        text = as_text(snapshot([], [CoordinatorView("c", SLO, window=served)]), 80)
        assert ("25 rounds without a session" in text) is bool(unnamed)


def test_sessions_whose_prefix_breaks_are_listed() -> None:
    text = as_text(healthy(breaking=(BREAKING,)), 120)
    assert "prefix breaks in every round: 2 sessions!; bbbbbbbb at token 12 of 4000" in text
