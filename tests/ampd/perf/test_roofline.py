"""The roofline: bounds by the published peaks, experts, replicated KV heads, and monotone times."""

import datetime
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.gpus import GPUS, gpu
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import analytic_model, load_performance_model, model_shape
from ampd.perf.roofline import Efficiency, analytic_profile
from ampd.types import Parallelism

SHIPPED = load_performance_model("qwen3-32b-h20")
QWEN, H20 = model_shape("qwen3-32b"), gpu("h20")
IDEAL = Efficiency(1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
QWEN_PAIR_FLOPS = 64 * 4 * 64 * 128
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
    compute_s = (2 * QWEN.active_parameters * 10_000 + QWEN_PAIR_FLOPS * pairs) / H20.flops_per_s
    kv_read_s = 30_000 * QWEN.kv_bytes_per_token / H20.memory_bytes_per_s
    assert model.prefill_s(30_000, 10_000, Parallelism(1)) == pytest.approx(compute_s + kv_read_s, rel=0.005)
    transfer_s = 1000 * QWEN.kv_bytes_per_token / H20.network_bytes_per_s
    assert model.kv_transfer_s(1000, Parallelism(1), Parallelism(1)) == pytest.approx(transfer_s, rel=0.001)
    reads_s = (QWEN.weight_bytes - 2 * QWEN.output_parameters) / H20.memory_bytes_per_s
    assert model.decode_step_s(1, 0, Parallelism(1)) == pytest.approx(reads_s, rel=0.005)


def test_a_mixture_reads_few_experts_for_few_tokens_and_computes_with_the_active_ones() -> None:
    shape = model_shape("mixtral-8x7b")
    model = PiecewiseModel(analytic_profile(shape, GPUS["h200"], (1,), DATE, IDEAL))
    theta, card = Parallelism(1), GPUS["h200"]
    one_s = (2 * shape.active_parameters + shape.output_bytes) / card.memory_bytes_per_s
    all_s = (shape.weight_bytes - shape.output_bytes) / card.memory_bytes_per_s
    assert model.decode_step_s(1, 0, theta) == pytest.approx(one_s, rel=0.01)
    assert model.decode_step_s(32, 0, theta) == pytest.approx(all_s, rel=0.02)
    attention_s = 32 * 4 * 32 * 128 * 20_000 * 10_000 / card.flops_per_s
    compute_s = 2 * shape.active_parameters * 20_000 / card.flops_per_s
    assert model.prefill_s(0, 20_000, theta) == pytest.approx(compute_s + attention_s, rel=0.02)


def test_each_format_is_multiplied_at_its_own_peak_where_the_gpu_has_it() -> None:
    whole, halved = model_shape("qwen3-32b"), model_shape("qwen3-32b-fp8")
    theta = Parallelism(1)
    for card, faster in ((GPUS["h200"], 2.0), (GPUS["a100"], 1.0)):
        times_s = [
            PiecewiseModel(analytic_profile(shape, card, (1,), DATE, IDEAL)).prefill_s(0, 4096, theta)
            for shape in (whole, halved)
        ]
        pairs_s = QWEN_PAIR_FLOPS * 4096 * 2048 / card.flops_per_s
        assert (times_s[0] - pairs_s) / (times_s[1] - pairs_s) == pytest.approx(faster, rel=0.01)
        steps_s = [
            PiecewiseModel(analytic_profile(shape, card, (1,), DATE, IDEAL)).decode_step_s(1, 0, theta)
            for shape in (whole, halved)
        ]
        assert steps_s[0] / steps_s[1] == pytest.approx(2, rel=0.03)


def test_latent_attention_reads_its_kv_on_every_gpu_and_computes_in_the_latent_space() -> None:
    shape, card = model_shape("deepseek-v3"), GPUS["b200"]
    model = PiecewiseModel(analytic_profile(shape, card, (4, 8), DATE, IDEAL))
    read_s = 61 * 576 * 2 / card.memory_bytes_per_s
    for tp in (4, 8):
        theta = Parallelism(tp)
        step_s = model.decode_step_s(1, 100_000, theta) - model.decode_step_s(1, 0, theta)
        assert step_s == pytest.approx(100_000 * read_s, rel=0.01)
        assert model.reload_s(1000, theta) == model.reload_s(1000, Parallelism(4))
    few = PiecewiseModel(analytic_profile(shape, GPUS["h20"], (1,), DATE, IDEAL))
    step_s = few.decode_step_s(1, 100_000, Parallelism(1)) - few.decode_step_s(1, 0, Parallelism(1))
    assert step_s == pytest.approx(100_000 * 61 * 2 * 128 * (2 * 512 + 64) / GPUS["h20"].flops_per_s, rel=0.01)


def test_windows_end_the_growth_of_a_layers_attention_and_of_what_moves() -> None:
    shape, card, theta = model_shape("gpt-oss-120b"), GPUS["h200"], Parallelism(1)
    model = PiecewiseModel(analytic_profile(shape, card, (1,), DATE, IDEAL))
    full_bytes = 18 * 2 * 8 * 64 * 2
    growth_s = model.decode_step_s(1, 50_000, theta) - model.decode_step_s(1, 10_000, theta)
    assert growth_s == pytest.approx(40_000 * full_bytes / card.memory_bytes_per_s, rel=0.001)
    begin_s, later_s = (model.kv_transfer_s(end, theta, theta) / end for end in (100, 100_000))
    assert begin_s == pytest.approx(2 * later_s, rel=0.01)
    assert later_s == pytest.approx(full_bytes / card.network_bytes_per_s, rel=0.01)


def test_states_are_read_and_written_for_each_sequence_and_moved_once() -> None:
    shape, card, theta = model_shape("qwen3-next-80b-a3b"), GPUS["h200"], Parallelism(2)
    state_bytes = 36 * (32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 4 * 2)
    assert shape.sequence_bytes == state_bytes
    model = PiecewiseModel(analytic_profile(shape, card, (2,), DATE, IDEAL))
    without = replace(shape, layers=tuple((replace(layer, state_bytes=0), count) for layer, count in shape.layers))
    lighter = PiecewiseModel(analytic_profile(without, card, (2,), DATE, IDEAL))
    added_s = model.decode_step_s(64, 0, theta) - lighter.decode_step_s(64, 0, theta)
    assert added_s == pytest.approx(64 * 2 * state_bytes / (2 * card.memory_bytes_per_s), rel=0.02)
    added_s = model.kv_transfer_s(1000, theta, theta) - lighter.kv_transfer_s(1000, theta, theta)
    assert added_s == pytest.approx(state_bytes / (2 * card.network_bytes_per_s), rel=0.01)
    tokens, all_tokens = model.kv_capacity_tokens(theta), lighter.kv_capacity_tokens(theta)
    assert tokens == pytest.approx((all_tokens or 0) / 1.9, rel=0.001)


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    shape = model_shape("qwen3-0.6b")  # 8 KV heads, 16 heads
    model = PiecewiseModel(analytic_profile(shape, H20, (8, 16), DATE))
    eight, sixteen = (model.profile.workers[index] for index in (0, 1))
    assert sixteen.decode.context_s_per_token == eight.decode.context_s_per_token
    assert eight.kv_capacity_tokens is not None
    assert model.reload_s(1000, Parallelism(16)) == model.reload_s(1000, Parallelism(8))
    assert sixteen.kv_capacity_tokens == pytest.approx(eight.kv_capacity_tokens, rel=0.02)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b", "qwen3-next-80b-a3b"])
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


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-120b", "llama-3.1-8b", "mixtral-8x7b", "qwen3-next-80b-a3b"])
@pytest.mark.parametrize("card", ["b200", "h200", "mi300x"])  # over PCIe a small model gains nothing
def test_more_gpus_never_make_a_large_prefill_slower(name: str, card: str) -> None:
    model = analytic_model(name, card)
    times_s = [model.prefill_s(0, 8192, theta) for theta in model.parallelisms]
    assert times_s == sorted(times_s, reverse=True)
