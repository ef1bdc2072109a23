"""From points to a profile: the error is that on points which the fit has not seen."""

import datetime
from dataclasses import replace

import pytest

from ampd.errors import RunError
from ampd.perf.presets import load_performance_model
from ampd.perf.profile import PerformanceProfile, Provenance
from ampd.types import Parallelism
from planner.profiler import Density, Limits, Points, fit_profile, grid_of, split

PROVENANCE = Provenance(
    kind="measured", source="a test", model="none", gpu="none", date=datetime.date(2026, 1, 1), method="invented"
)
SHARE, SEED = 0.2, 3


def exact() -> Points:
    """Points of known curves of one segment each."""
    return Points(
        prefill=[
            (hist, incr, 0.01 + 1e-4 * incr + 2e-8 * incr * (hist + incr / 2) + 1e-7 * hist)
            for hist in (0, 512, 2048)
            for incr in (32, 64, 128, 512, 1024)
        ],
        decode=[(b, b * each, 0.004 + 3e-4 * b + 2e-7 * b * each) for b in (1, 2, 4, 8) for each in (128, 512, 1024)],
        transfer=[(n, 0.003 + 2e-6 * n) for n in (16, 64, 256, 512, 1024, 2048)],
        discarded=0,
    )


def fitted(points: Points) -> PerformanceProfile:
    return fit_profile(points, PROVENANCE, 1, SHARE, SEED, kv_capacity_tokens=4096, kv_bytes_per_token=64)


def test_exact_points_give_their_curves_back() -> None:
    profile = fitted(exact())
    assert set(profile.provenance.fit_error) == {
        f"{curve}_{what}" for curve in ("prefill", "decode", "kv_transfer") for what in ("mean", "max")
    }
    assert max(profile.provenance.fit_error.values()) == 0.0
    (segment,) = profile.workers[0].decode.segments
    assert segment.alpha_s == pytest.approx(0.004)
    assert segment.beta_s_per_sequence == pytest.approx(3e-4)
    assert profile.workers[0].kv_capacity_tokens == 4096
    assert profile.kv_bytes_per_token == 64


def test_a_held_out_point_changes_the_error_and_not_the_curve() -> None:
    plain, points = fitted(exact()), exact()
    _, held = split(points.transfer, SHARE, SEED)
    points.transfer = [(n, 2 * s if (n, s) in held else s) for n, s in points.transfer]
    changed = fitted(points)
    assert changed.kv_transfers == plain.kv_transfers
    # Measured is twice what is predicted.
    assert changed.provenance.fit_error["kv_transfer_max"] == pytest.approx(0.5)


def test_a_fitted_point_changes_the_curve() -> None:
    plain, points = fitted(exact()), exact()
    points.transfer[-1] = (points.transfer[-1][0], 2 * points.transfer[-1][1])
    assert fitted(points).kv_transfers != plain.kv_transfers


@pytest.mark.parametrize("curve", ["prefill", "decode", "transfer"])
def test_too_few_points_are_an_error_that_names_them(curve: str) -> None:
    points = exact()
    setattr(points, curve, getattr(points, curve)[:2])
    with pytest.raises(RunError, match=f"only 2 {curve} points"):
        fitted(points)


TP1 = Parallelism(1)


TRUE = load_performance_model("qwen3-32b-h20")


INVENTED = Provenance.model_validate(
    {"kind": "rough", "source": "a test", "model": "-", "gpu": "-", "date": "2026-01-01", "method": "invented"}
)


def test_the_fit_finds_the_model_and_says_how_far_it_is_off_on_points_it_has_not_seen() -> None:
    grid = grid_of(Density.NORMAL, Limits(40_000, 400_000, 16))
    points = Points(
        prefill=[(h, i, TRUE.prefill_s(h, i, TP1)) for h, i in grid.prefill],
        decode=[(b, b * c, TRUE.decode_step_s(b, b * c, TP1)) for b, c in grid.decode],
        transfer=[(n, TRUE.kv_transfer_s(n, TP1, TP1)) for n in grid.transfer],
    )
    profile = fit_profile(points, INVENTED, 1, 0.2, 0, kv_capacity_tokens=7)
    errors = profile.provenance.fit_error
    assert set(errors) == {
        f"{curve}_{what}" for curve in ("prefill", "decode", "kv_transfer") for what in ("mean", "max")
    }
    assert errors["prefill_mean"] < 0.03
    assert errors["decode_mean"] < 0.03
    assert profile.workers[0].kv_capacity_tokens == 7
    slow = [(n, s * (10 if n == 1024 else 1)) for n, s in points.transfer]
    broken = replace(points, transfer=slow)
    held = [point for point in split(broken.transfer, 0.2, 3)[1] if point[0] == 1024]
    seeds = [seed for seed in range(20) if any(n == 1024 for n, _ in split(broken.transfer, 0.2, seed)[1])]
    assert seeds, held
    assert fit_profile(broken, INVENTED, 1, 0.2, seeds[0]).provenance.fit_error["kv_transfer_max"] > 0.5


def test_too_few_points_are_an_error() -> None:
    points = Points(prefill=[(0, 16, 0.1)] * 4, decode=[(1, 100, 0.1)] * 4, transfer=[(16, 0.1), (32, 0.1)])
    with pytest.raises(RunError, match="only 2 transfer points"):
        fit_profile(points, INVENTED, 1, 0.2, 0)
