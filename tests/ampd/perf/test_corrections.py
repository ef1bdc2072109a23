"""Corrected times: bounded, monotone, soon right if the model is wrong, and unchanged if it is right."""

import random
from itertools import pairwise
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.corrections import KINDS, LOAD, MIXED, PREFILL, READ, STEP, CorrectedModel
from ampd.perf.model import ScaledModel
from ampd.perf.presets import load_performance_model
from ampd.types import LEAST_FACTOR, MOST_FACTOR, Factors, Parallelism
from ampd.wire import fields_of

TP4 = Parallelism(4)
MODEL = load_performance_model("qwen3-32b-h20")

kinds = st.integers(0, len(KINDS) - 1)
seconds = st.floats(1e-6, 1e3)


def corrected() -> CorrectedModel:
    return CorrectedModel(MODEL, TP4)


def factor(times: CorrectedModel, kind: int) -> float:
    return float(fields_of(times.parallelism.factors)[KINDS[kind]])


def predicted_s(times: CorrectedModel, kind: int) -> float:
    return {
        PREFILL: lambda: times.prefill_s(1000, 500, TP4),
        STEP: lambda: times.decode_step_s(20, 40_000, TP4),
        MIXED: lambda: times.mixed_pass_s([(1000, 100)], 20, 40_000, TP4),
        READ: lambda: times.kv_transfer_s(4000, TP4, TP4),
        LOAD: lambda: times.reload_s(4000, TP4),
    }[kind]()


def work(times: CorrectedModel, kind: int, ratio: float, for_s: float) -> None:
    """Measure passes that take `ratio` times as long as the model says: as many as it takes for `for_s` seconds."""
    model_s = predicted_s(corrected(), kind)
    for _ in range(int(for_s / model_s) + 1):
        times.measured(kind, predicted_s(times, kind), ratio * model_s)


@given(st.lists(st.tuples(kinds, seconds, seconds)))
def test_factors_are_bounded_whatever_is_measured(measured: list[tuple[int, float, float]]) -> None:
    times = corrected()
    for kind, expected_s, took_s in measured:
        times.measured(kind, expected_s, took_s)
        assert all(LEAST_FACTOR <= each <= MOST_FACTOR for each in fields_of(times.parallelism.factors).values())


@given(st.lists(st.tuples(kinds, seconds)))
def test_a_right_model_is_never_changed(measured: list[tuple[int, float]]) -> None:
    times = corrected()
    for kind, took_s in measured:
        times.measured(kind, took_s, took_s)
    assert times.parallelism.factors == Factors()
    for kind in range(len(KINDS)):
        assert predicted_s(times, kind) == predicted_s(corrected(), kind)


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("ratio", [0.3, 0.77, 1.3, 3.0])
def test_a_wrong_model_is_right_within_seconds_of_work(kind: int, ratio: float) -> None:
    times = corrected()
    work(times, kind, ratio, 5.0)
    assert abs(log(factor(times, kind) / ratio)) < 0.12 * abs(log(ratio))
    work(times, kind, ratio, 55.0)
    assert factor(times, kind) == pytest.approx(ratio, rel=0.015)
    assert predicted_s(times, kind) == pytest.approx(ratio * predicted_s(corrected(), kind), rel=0.015)


def test_a_model_that_is_wrong_by_more_than_the_bound_is_corrected_to_the_bound() -> None:
    times = corrected()
    work(times, STEP, 10.0, 600.0)
    assert factor(times, STEP) == pytest.approx(MOST_FACTOR, rel=0.04)


def test_factors_follow_smoothly() -> None:
    times, seen = corrected(), [1.0]
    for _ in range(2000):
        work(times, STEP, 1.5, 0.0)
        seen.append(factor(times, STEP))
    assert all(before <= after <= 1.5 for before, after in pairwise(seen))
    assert max(after / before for before, after in pairwise(seen)) < 1.03


@given(kinds, st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.2, 5.0)), min_size=1, max_size=20), st.data())
def test_longer_times_never_make_a_factor_smaller(
    kind: int, measured: list[tuple[float, float]], data: st.DataObject
) -> None:
    slower = data.draw(st.integers(0, len(measured) - 1))
    short, long = corrected(), corrected()
    for number, (model_s, ratio) in enumerate(measured):
        for times, more in ((short, 1.0), (long, 1.5 if number == slower else 1.0)):
            # The model's own time times the factor: what it predicts now.
            times.measured(kind, model_s * factor(times, kind), model_s * ratio * more)
    assert factor(long, kind) >= factor(short, kind) * 0.99  # small changes are not shown


def test_noise_moves_a_right_model_by_less_than_two_percent() -> None:
    rng, times = random.Random(1), corrected()
    true_s = predicted_s(times, STEP)
    seen = []
    for number in range(20_000):
        times.measured(STEP, predicted_s(times, STEP), true_s * rng.uniform(0.8, 1.2))
        if number > 1000:
            seen.append(factor(times, STEP))
    # The mean of the logarithm of such noise is 0.7 % below 1.
    assert min(seen) > 0.98
    assert max(seen) < 1.02


def test_one_long_stall_moves_a_factor_little() -> None:
    times = corrected()
    work(times, STEP, 1.0, 20.0)
    times.measured(STEP, predicted_s(times, STEP), 60.0)
    assert factor(times, STEP) < 1.01


def test_kinds_are_corrected_apart() -> None:
    times = corrected()
    work(times, STEP, 0.5, 60.0)
    work(times, MIXED, 2.0, 60.0)
    work(times, PREFILL, 1.0, 60.0)
    factors = times.parallelism.factors
    assert (factors.read, factors.load) == (1.0, 1.0)
    assert factors.prefill == pytest.approx(1.0, rel=0.01)
    assert factors.mixed == pytest.approx(2.0, rel=0.02)
    assert factors.step == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(("measured", "other"), [(PREFILL, MIXED), (MIXED, PREFILL)])
def test_prefills_and_mixed_passes_stand_in_for_each_other(measured: int, other: int) -> None:
    times = corrected()
    work(times, measured, 1.5, 20.0)
    assert factor(times, other) == pytest.approx(factor(times, measured), rel=0.01)
    assert factor(times, STEP) == 1.0
    work(times, other, 0.8, 60.0)
    assert factor(times, other) == pytest.approx(0.8, rel=0.03)
    assert factor(times, measured) == pytest.approx(1.5, rel=0.03)


def test_coordinators_predict_with_the_factors_of_the_view() -> None:
    times = corrected()
    for kind in range(len(KINDS)):
        work(times, kind, 1.3, 30.0)
    theta = times.parallelism
    assert theta == TP4
    assert hash(theta) == hash(TP4)
    assert MODEL.prefill_s(1000, 500, theta) == times.prefill_s(1000, 500, TP4)
    assert MODEL.decode_step_s(20, 40_000, theta) == times.decode_step_s(20, 40_000, TP4)
    assert MODEL.kv_transfer_s(4000, TP4, theta) == times.kv_transfer_s(4000, TP4, TP4)
    assert MODEL.reload_s(4000, theta) == times.reload_s(4000, TP4)
    assert MODEL.mixed_pass_s([(1000, 100)], 20, 40_000, theta) == predicted_s(times, MIXED)


def test_a_scaled_model_is_corrected_to_the_true_one() -> None:
    times = CorrectedModel(ScaledModel(MODEL, 1.3, 0.7, 1.0), TP4)
    for _ in range(5000):
        times.measured(PREFILL, times.prefill_s(1000, 500, TP4), MODEL.prefill_s(1000, 500, TP4))
        times.measured(STEP, times.decode_step_s(20, 40_000, TP4), MODEL.decode_step_s(20, 40_000, TP4))
    assert times.prefill_s(0, 300, TP4) == pytest.approx(MODEL.prefill_s(0, 300, TP4), rel=0.01)
    assert times.decode_step_s(5, 9000, TP4) == pytest.approx(MODEL.decode_step_s(5, 9000, TP4), rel=0.01)


def test_factors_of_passes_that_the_engine_has_measured_are_taken_over() -> None:
    times = corrected()
    work(times, READ, 1.5, 20.0)
    times.adopt(Factors(prefill=1.2, step=0.8, mixed=1.1, read=3.0, load=3.0))
    work(times, LOAD, 2.0, 20.0)
    factors = times.parallelism.factors
    assert (factors.prefill, factors.step, factors.mixed) == (1.2, 0.8, 1.1)
    assert (factors.read, factors.load) == (pytest.approx(1.5, rel=0.01), pytest.approx(2.0, rel=0.01))
