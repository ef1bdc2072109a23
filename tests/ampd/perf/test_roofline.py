import datetime

import pytest

from ampd.perf.piecewise import PiecewiseModel, load_performance_model
from ampd.perf.roofline import H20, QWEN3_32B, Efficiency, analytic_profile
from ampd.types import Parallelism

SHIPPED = load_performance_model("qwen3-32b-h20")


def test_the_shipped_profile_is_what_the_roofline_gives() -> None:
    made = analytic_profile(QWEN3_32B, H20, (1, 2, 4, 8), Efficiency(), SHIPPED.provenance.date)
    assert made == SHIPPED.profile


def test_the_dimensions_give_the_published_sizes() -> None:
    assert QWEN3_32B.layer_parameters == pytest.approx(31.2e9, rel=0.01)  # non-embedding parameters, model card
    assert QWEN3_32B.kv_bytes_per_token == 256 * 1024


def test_bounds_hold_at_both_ends() -> None:
    """No prefill beats the peak of the GPUs, no decode step beats reading the weights once."""
    for tp in (1, 2, 4, 8):
        parallelism = Parallelism(tp)
        flops = 2 * QWEN3_32B.layer_parameters * 20_000
        assert SHIPPED.prefill_s(0, 20_000, parallelism) > flops / (tp * H20.flops_per_s)
        weight_bytes = 2 * QWEN3_32B.layer_parameters
        assert SHIPPED.decode_step_s(1, 1, parallelism) > weight_bytes / (tp * H20.memory_bytes_per_s)


def test_full_efficiency_is_the_plain_roofline() -> None:
    ideal = Efficiency(1, 1, 1, 1, 1, 0, 0, 0)
    model = PiecewiseModel(analytic_profile(QWEN3_32B, H20, (1,), ideal, datetime.date(2026, 1, 1)))
    pairs = 10_000 * (30_000 + 5_000)
    compute_s = (2 * QWEN3_32B.layer_parameters * 10_000 + QWEN3_32B.attention_flops_per_pair * pairs) / H20.flops_per_s
    kv_read_s = 30_000 * QWEN3_32B.kv_bytes_per_token / H20.memory_bytes_per_s
    assert model.prefill_s(30_000, 10_000, Parallelism(1)) == pytest.approx(compute_s + kv_read_s, rel=0.005)
    transfer_s = 1000 * QWEN3_32B.kv_bytes_per_token / H20.network_bytes_per_s
    assert model.kv_transfer_s(1000, Parallelism(1), Parallelism(1)) == pytest.approx(transfer_s, rel=0.001)
