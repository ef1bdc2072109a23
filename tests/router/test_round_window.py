"""The last minute of a coordinator: rounds are counted as they ended, and forgotten when their time is over."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.telemetry.metrics import names
from ampd.telemetry.served_window import ServedWindow
from ampd.types import Slo
from router.decision_record import Decided, DecisionRecord, RoundFacts
from router.round_window import RoundWindow
from router.served import ServedRound

SLO = Slo(ttft_s=0.5, itl_s=0.05)
START_S = 1000.25


class Clock:
    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


def served(route: str = "local", reason: str = "on-time", ttft_s: float | None = 0.1, **fields: object) -> ServedRound:
    round_ = ServedRound(
        DecisionRecord(RoundFacts("s", "ampd"), Decided(route, reason)),
        SLO,
        is_initial=False,
        is_complete=True,
        ttft_s=ttft_s,
        itl_s=0.02,
        output_tokens=10,
        was_left=False,
        lasted_s=1.0,
    )
    return replace(round_, **fields)  # type: ignore[arg-type]


def window_of(*rounds: ServedRound) -> RoundWindow:
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
    view = window_of(*rounds, served(itl_s=0.06)).read()
    assert (view.rounds, view.judged, view.abandoned, view.failed) == (7, 6, 1, 1)
    assert (view.met, view.met_ttft, view.met_itl) == (1, 3, 2)


def test_the_targets_of_the_rounds_add_up() -> None:
    view = window_of(served(), served(slo=Slo(0.1, 0.01))).read()
    assert (view.ttft_targets_s, view.itl_targets_s) == (pytest.approx(0.6), pytest.approx(0.06))


def test_latencies_are_kept_by_kind_of_prefill() -> None:
    view = window_of(served(is_initial=True, ttft_s=2.0), served(ttft_s=0.25), served(ttft_s=0.75, itl_s=None)).read()
    assert (view.ttft_initial.count, view.ttft_initial.mean_s) == (1, 2.0)
    assert (view.ttft_incremental.count, view.ttft_incremental.mean_s) == (2, 0.5)
    assert view.itl.count == 2
    assert view.output_tokens == 30


def test_routes_sum_to_the_rounds_whatever_policies_call_them() -> None:
    view = window_of(served(), served(), served("remote"), served("remote", reason="Not a word!")).read()
    assert view.routes == {"local on-time": 2, "remote on-time": 1, f"remote {names.OTHER}": 1}
    assert sum(view.routes.values()) == view.rounds


def test_reasons_stay_few() -> None:
    def word(number: int) -> str:
        return "".join(chr(ord("a") + int(digit)) for digit in str(number))

    view = window_of(*(served(reason=word(number)) for number in range(1000))).read()
    assert len(view.routes) < 100
    assert sum(view.routes.values()) == 1000


def test_what_is_older_than_the_window_is_forgotten() -> None:
    clock = Clock()
    window = RoundWindow(length_s=10, clock=clock)
    window(served())
    window.add_sessions(3, 1)
    window.add_refused()
    window.add_unnamed()
    clock.now_s += 9.5
    window(served(ttft_s=0.3))
    before = window.read()
    assert (before.rounds, before.sessions_bound, before.sessions_repinned, before.refused) == (2, 3, 1, 1)
    assert before.unnamed == 1
    clock.now_s += 1.0
    after = window.read()
    assert (after.rounds, after.sessions_bound, after.sessions_repinned, after.refused) == (1, 0, 0, 0)
    assert after.ttft_incremental.mean_s == 0.3
    clock.now_s += 1000.0
    assert replace(window.read(), span_s=0.0) == ServedWindow(length_s=10)


def test_rates_divide_by_the_time_that_there_was() -> None:
    clock = Clock()
    window = RoundWindow(length_s=10, clock=clock)
    clock.now_s += 4.0
    assert window.read().span_s == pytest.approx(4.0)
    clock.now_s += 100.0
    view = window.read()
    assert (view.length_s, view.span_s) == (10, pytest.approx(9.25))  # nine whole seconds and the one that runs


@given(st.lists(st.floats(0, 30), max_size=60), st.integers(1, 20), st.integers())
def test_at_any_time_it_counts_what_ended_in_its_seconds(waits_s: list[float], length_s: int, seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    window, ended_s = RoundWindow(length_s, clock), list[float]()
    for wait_s in waits_s:
        clock.now_s += wait_s * rng.random()
        window(served())
        ended_s.append(clock.now_s)
        first_second = int(clock.now_s) - length_s + 1
        assert window.read().rounds == sum(int(at_s) >= first_second for at_s in ended_s)


def test_a_clock_that_steps_back_loses_nothing() -> None:
    clock = Clock()
    window = RoundWindow(clock=clock)
    window(served())
    clock.now_s -= 5.0
    window(served())
    assert window.read().rounds == 2
