"""The last minute of a coordinator: rounds are counted as they ended, and forgotten when their time is over."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.telemetry.metrics import names
from ampd.telemetry.windows import latency_summary
from ampd.types import ServedWindow, Slo
from router.decision_record import DecisionRecord
from router.round_window import RoundWindow

SLO = Slo(ttft_s=0.5, itl_s=0.05)
START_S = 1000.25


class Clock:
    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


def served(
    route: str = "local", reason: str = "on-time", ttft_s: float | None = 0.1, **fields: object
) -> DecisionRecord:
    round_ = DecisionRecord(
        "s",
        "ampd",
        SLO,
        route=route,
        reason=reason,
        is_initial=False,
        is_complete=True,
        ttft_s=ttft_s,
        itl_s=0.02,
        output_tokens=10,
        was_left=False,
        lasted_s=1.0,
    )
    return replace(round_, **fields)  # type: ignore[arg-type]


def rounds_in(view: ServedWindow) -> int:
    return sum(count for word, count in view.counts.items() if word.startswith("outcome "))


def routes_in(view: ServedWindow) -> dict[str, int]:
    return {word: count for word, count in view.counts.items() if word.startswith("route ")}


def window_of(*rounds: DecisionRecord) -> RoundWindow:
    window = RoundWindow(clock=Clock())
    for round_ in rounds:
        window(round_)
    return window


def test_each_outcome_counts_as_what_it_is() -> None:
    rounds = [
        served(),
        served(ttft_s=0.6),
        served(itl_s=0.06),
        served(ttft_s=0.6, itl_s=0.06),
        served(is_complete=False),
        served(ttft_s=None, itl_s=None, is_complete=False, was_left=True, lasted_s=0.1),
    ]
    assert [round_.outcome for round_ in rounds] == list(names.OUTCOMES)
    counts = window_of(*rounds, served(itl_s=0.06)).read().counts
    assert [counts[f"outcome {outcome}"] for outcome in names.OUTCOMES] == [1, 1, 2, 1, 1, 1]


def test_the_targets_of_the_rounds_add_up() -> None:
    counts = window_of(served(), served(slo=Slo(0.1, 0.01))).read().counts
    assert (counts["ttft_targets_us"], counts["itl_targets_us"]) == (600_000, 60_000)


def test_targets_without_end_leave_numbers_that_others_can_read() -> None:
    counts = window_of(*[served(slo=Slo(1e30, 1e30))] * 5000).read().counts
    assert counts["ttft_targets_us"] < 1 << 53


def test_latencies_are_kept_by_kind_of_prefill() -> None:
    view = window_of(served(is_initial=True, ttft_s=2.0), served(ttft_s=0.25), served(ttft_s=0.75, itl_s=None)).read()
    found = {kind: latency_summary(view.counts, kind) for kind in ("ttft_initial", "ttft_incremental", "itl")}
    assert [(each["count"], each["mean"]) for each in found.values()] == [(1, 2.0), (2, 0.5), (2, 0.02)]
    assert view.counts["output_tokens"] == 30


def test_routes_sum_to_the_rounds_whatever_policies_call_them() -> None:
    view = window_of(served(), served(), served("remote"), served("remote", reason="Not a word!")).read()
    assert routes_in(view) == {"route local on-time": 2, "route remote on-time": 1, f"route remote {names.OTHER}": 1}


def test_reasons_stay_few() -> None:
    def word(number: int) -> str:
        return "".join(chr(ord("a") + int(digit)) for digit in str(number))

    view = window_of(*(served(reason=word(number)) for number in range(1000))).read()
    assert len(routes_in(view)) < 100
    assert sum(routes_in(view).values()) == 1000


def test_what_is_older_than_the_window_is_forgotten() -> None:
    clock = Clock()
    window = RoundWindow(length_s=10, clock=clock)
    window(served())
    window.add({"bound": 3, "moved": 1, "refused": 1, "unnamed": 1})
    clock.now_s += 9.5
    window(served(ttft_s=0.3))
    before = window.read()
    assert (rounds_in(before), *(before.counts[word] for word in ("bound", "moved", "refused", "unnamed"))) == (
        2,
        3,
        1,
        1,
        1,
    )
    clock.now_s += 1.0
    after = window.read()
    assert rounds_in(after) == 1
    assert not after.counts.keys() & {"bound", "moved", "refused", "unnamed"}
    assert latency_summary(after.counts, "ttft_incremental")["mean"] == 0.3
    clock.now_s += 1000.0
    assert window.read().counts == {}


def test_rates_divide_by_the_time_that_there_was() -> None:
    clock = Clock()
    window = RoundWindow(length_s=10, clock=clock)
    clock.now_s += 4.0
    assert window.read().span_s == pytest.approx(4.0)
    clock.now_s += 100.0
    assert window.read().span_s == pytest.approx(9.25)  # nine whole seconds and the one that runs


@given(st.lists(st.floats(0, 30), max_size=60), st.integers(1, 20), st.integers())
def test_at_any_time_it_counts_what_ended_in_its_seconds(waits_s: list[float], length_s: int, seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    window, ended_s = RoundWindow(length_s, clock), list[float]()
    for wait_s in waits_s:
        clock.now_s += wait_s * rng.random()
        window(served())
        ended_s.append(clock.now_s)
        first_second = int(clock.now_s) - length_s + 1
        assert rounds_in(window.read()) == sum(int(at_s) >= first_second for at_s in ended_s)


def test_a_clock_that_steps_back_loses_nothing() -> None:
    clock = Clock()
    window = RoundWindow(clock=clock)
    window(served())
    clock.now_s -= 5.0
    window(served())
    assert rounds_in(window.read()) == 2
