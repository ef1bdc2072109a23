"""The roofline: bounds by the published peaks, experts, replicated KV heads, and monotone times."""

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import MODELS, analytic_model, load_performance_model
from ampd.perf.roofline import GPUS, Efficiency, analytic_profile, gpu
from ampd.types import Parallelism

SHIPPED = load_performance_model("qwen3-32b-h20")
QWEN, H20 = MODELS["qwen3-32b"], gpu("h20")
IDEAL = Efficiency(1, 1, 1, 1, 1, 0, 0, 0)
DATE = datetime.date(2026, 1, 1)


def test_the_shipped_profile_is_what_the_roofline_gives() -> None:
    assert analytic_model("qwen3-32b", "h20").profile == SHIPPED.profile


def test_bounds_hold_at_both_ends() -> None:
    """No prefill beats the peak of the GPUs, no decode step beats reading the weights once."""
    for parallelism in SHIPPED.parallelisms:
        flops = 2 * QWEN.active_parameters * 20_000
        assert SHIPPED.prefill_s(0, 20_000, parallelism) > flops / (parallelism.tp * H20.flops_per_s)
        weight_bytes = 2 * QWEN.active_parameters
        assert SHIPPED.decode_step_s(1, 1, parallelism) > weight_bytes / (parallelism.tp * H20.memory_bytes_per_s)


def test_full_efficiency_is_the_plain_roofline() -> None:
    model = PiecewiseModel(analytic_profile(QWEN, H20, (1,), DATE, IDEAL))
    pairs = 10_000 * (30_000 + 5_000)
    compute_s = (2 * QWEN.active_parameters * 10_000 + QWEN.attention_flops_per_pair * pairs) / H20.flops_per_s
    kv_read_s = 30_000 * QWEN.kv_bytes_per_token / H20.memory_bytes_per_s
    assert model.prefill_s(30_000, 10_000, Parallelism(1)) == pytest.approx(compute_s + kv_read_s, rel=0.005)
    transfer_s = 1000 * QWEN.kv_bytes_per_token / H20.network_bytes_per_s
    assert model.kv_transfer_s(1000, Parallelism(1), Parallelism(1)) == pytest.approx(transfer_s, rel=0.001)
    reads_s = (QWEN.weight_bytes - 2 * QWEN.output_parameters) / H20.memory_bytes_per_s
    assert model.decode_step_s(1, 0, Parallelism(1)) == pytest.approx(reads_s, rel=0.005)


def test_a_mixture_reads_few_experts_for_few_tokens_and_computes_with_the_active_ones() -> None:
    shape = MODELS["mixtral-8x7b"]
    model = PiecewiseModel(analytic_profile(shape, GPUS["h200"], (1,), DATE, IDEAL))
    theta, card = Parallelism(1), GPUS["h200"]
    output_bytes = 2 * shape.output_parameters
    one_s = (2 * (shape.attention_parameters + 2 * shape.expert_parameters) + output_bytes) / card.memory_bytes_per_s
    all_s = (2 * (shape.attention_parameters + 8 * shape.expert_parameters) + output_bytes) / card.memory_bytes_per_s
    assert model.decode_step_s(1, 0, theta) == pytest.approx(one_s, rel=0.01)
    assert model.decode_step_s(32, 0, theta) == pytest.approx(all_s, rel=0.02)
    attention_s = shape.attention_flops_per_pair * 20_000 * 10_000 / card.flops_per_s
    compute_s = 2 * shape.active_parameters * 20_000 / card.flops_per_s
    assert model.prefill_s(0, 20_000, theta) == pytest.approx(compute_s + attention_s, rel=0.02)


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    shape = MODELS["qwen3-0.6b"]  # 8 KV heads, 16 heads
    model = PiecewiseModel(analytic_profile(shape, H20, (8, 16), DATE))
    eight, sixteen = (model.profile.workers[index] for index in (0, 1))
    assert sixteen.decode.context_s_per_token == eight.decode.context_s_per_token
    assert eight.kv_capacity_tokens is not None
    assert model.reload_s(1000, Parallelism(16)) == model.reload_s(1000, Parallelism(8))
    assert sixteen.kv_capacity_tokens == pytest.approx(eight.kv_capacity_tokens, rel=0.02)


@pytest.mark.parametrize("name", sorted(MODELS))
@given(st.data())
def test_more_work_never_takes_less_time(name: str, data: st.DataObject) -> None:
    model = analytic_model(name, "h200")
    theta = data.draw(st.sampled_from(model.parallelisms))
    few, many = sorted(data.draw(st.tuples(st.integers(0, 9000), st.integers(0, 9000))))
    other = data.draw(st.integers(0, 60_000))
    assert model.prefill_s(other, few, theta) <= model.prefill_s(other, many, theta)
    assert model.prefill_s(few, 1 + other, theta) <= model.prefill_s(many, 1 + other, theta)
    assert model.decode_step_s(few, other, theta) <= model.decode_step_s(many, other, theta)
    assert model.kv_transfer_s(few, theta, theta) <= model.kv_transfer_s(many, theta, theta)
    assert model.reload_s(few, theta) <= model.reload_s(many, theta)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("card", sorted(GPUS.keys() - {"l40s"}))  # over PCIe a small model gains nothing
def test_more_gpus_never_make_a_large_prefill_slower(name: str, card: str) -> None:
    model = analytic_model(name, card)
    times_s = [model.prefill_s(0, 8192, theta) for theta in model.parallelisms]
    assert times_s == sorted(times_s, reverse=True)
