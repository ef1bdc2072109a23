"""Fits: an exact curve is found again from its points, noise averages out, coefficients stay non-negative."""

import datetime
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.fit import fit_decode, fit_prefill, fit_transfer
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.profile import (
    DecodeCurve,
    DecodeSegment,
    ParallelismCurves,
    PerformanceProfile,
    PrefillCurve,
    PrefillSegment,
    Provenance,
    TransferCurve,
    TransferSegment,
)
from ampd.types import Parallelism

TP1 = Parallelism(1)
PROVENANCE = Provenance(
    kind="rough", source="a test", model="none", gpu="none", date=datetime.date(2026, 1, 1), method="invented"
)
HIST = (0, 500, 2000, 8000, 30000)
INCR = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BATCH = (1, 2, 4, 8, 16, 32, 64)
positive = st.floats(1e-3, 1.0)


def model(prefill: PrefillCurve, decode: DecodeCurve, transfer: TransferCurve) -> PiecewiseModel:
    workers = (ParallelismCurves(tp=1, prefill=prefill, decode=decode),)
    return PiecewiseModel(PerformanceProfile(provenance=PROVENANCE, workers=workers, kv_transfers=(transfer,)))


def curves(first: float, second: float) -> PiecewiseModel:
    """Two segments in every curve; the first slopes are smaller or larger than the second ones."""
    return model(
        PrefillCurve(
            history_s_per_token=1e-7,
            segments=(
                PrefillSegment(
                    from_incr_tokens=0, alpha_s=0.01, beta_s_per_token=1e-4 * first, gamma_s_per_token2=1e-9
                ),
                PrefillSegment(
                    from_incr_tokens=256, alpha_s=0, beta_s_per_token=1e-4 * second, gamma_s_per_token2=1e-9
                ),
            ),
        ),
        DecodeCurve(
            context_s_per_token=1e-7,
            segments=(
                DecodeSegment(from_batch=0, alpha_s=0.01, beta_s_per_sequence=1e-3 * first),
                DecodeSegment(from_batch=16, alpha_s=0, beta_s_per_sequence=1e-3 * second),
            ),
        ),
        TransferCurve(
            tp_source=1,
            tp_target=1,
            segments=(
                TransferSegment(from_tokens=0, alpha_s=0.001, beta_s_per_token=1e-6 * first),
                TransferSegment(from_tokens=1024, alpha_s=0, beta_s_per_token=1e-6 * second),
            ),
        ),
    )


def refitted(true: PiecewiseModel, noise: float = 0.0, seed: int = 0) -> PiecewiseModel:
    rng = random.Random(seed)

    def seen(seconds: float) -> float:
        return seconds * (1 + rng.uniform(-noise, noise))

    return model(
        fit_prefill([(h, i, seen(true.prefill_s(h, i, TP1))) for h in HIST for i in INCR]),
        fit_decode([(b, b * c, seen(true.decode_step_s(b, b * c, TP1))) for b in BATCH for c in (100, 1000, 9000)]),
        fit_transfer([(n, seen(true.kv_transfer_s(n, TP1, TP1))) for n in (*INCR, 10_000, 30_000)], 1, 1),
    )


def assert_alike(first: PiecewiseModel, other: PiecewiseModel, rel: float) -> None:
    for hist in (0, 1000, 20_000):
        for incr in (12, 100, 700, 3000):
            assert first.prefill_s(hist, incr, TP1) == pytest.approx(other.prefill_s(hist, incr, TP1), rel=rel)
    for batch in (1, 6, 24, 50):
        assert first.decode_step_s(batch, 5000, TP1) == pytest.approx(other.decode_step_s(batch, 5000, TP1), rel=rel)
    for tokens in (10, 900, 20_000):
        assert first.kv_transfer_s(tokens, TP1, TP1) == pytest.approx(other.kv_transfer_s(tokens, TP1, TP1), rel=rel)


@given(positive, positive)
def test_an_exact_curve_is_found_again(first: float, second: float) -> None:
    true = curves(first, second)
    assert_alike(refitted(true), true, rel=1e-3)


def test_noise_averages_out() -> None:
    true = curves(0.3, 0.9)
    assert_alike(refitted(true, noise=0.05, seed=3), true, rel=0.06)


def test_noise_alone_earns_no_breakpoint() -> None:
    rng = random.Random(1)
    line = [(n, (1e-3 + 1e-6 * n) * (1 + rng.uniform(-0.05, 0.05))) for n in range(100, 4000, 100)]
    assert len(fit_transfer(line, 1, 1).segments) == 1


def test_costs_are_never_negative() -> None:
    falling = [(n, 1.0 - n / 1e4) for n in range(100, 4000, 300)]
    curve = fit_transfer(falling, 1, 1)
    assert all(segment.alpha_s >= 0 and segment.beta_s_per_token >= 0 for segment in curve.segments)
