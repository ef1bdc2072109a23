"""Degrees that fit a model's heads, and engine arguments that the KV exchange cannot follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ampd.errors import UserError
from ampd.perf.presets import DEGREES
from workers.engines.sglang_settings import check_arguments, check_degree, check_page_size


def model(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fitting(folder: Path) -> list[int]:
    degrees = []
    for degree in DEGREES:
        try:
            check_degree(folder, degree, "worker")
        except UserError:
            continue
        degrees.append(degree)
    return degrees


@pytest.mark.parametrize(
    ("config", "degrees"),
    [
        ({"num_attention_heads": 64, "num_key_value_heads": 8}, [1, 2, 4, 8]),
        ({"num_attention_heads": 8, "num_key_value_heads": 1}, [1, 2, 4, 8]),  # replicated
        ({"num_attention_heads": 24, "num_key_value_heads": 6}, [1, 2]),  # 6 KV heads neither divide by 4 nor divide 4
        ({"num_attention_heads": 12}, [1, 2, 4]),
        ({"num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 4}, [1, 2, 4]),
        ({"text_config": {"num_attention_heads": 4, "num_key_value_heads": 2}}, [1, 2, 4]),
        ({"num_attention_heads": 7}, [1]),
        ({}, [1, 2, 4, 8]),
    ],
)
def test_degrees_divide_the_heads_and_kv_heads_may_be_replicated(
    tmp_path: Path, config: dict[str, Any], degrees: list[int]
) -> None:
    assert fitting(model(tmp_path, **config)) == degrees


@pytest.mark.parametrize(
    ("tp", "words"),
    [
        (8, "worker: --tp 8 does not fit the model's num_attention_heads=4; use one of: 1, 2, 4"),
        (3, "worker: --tp 3 is not a supported degree; use one of: 1, 2, 4"),
    ],
)
def test_a_degree_that_does_not_fit_is_refused_with_those_that_do(tmp_path: Path, tp: int, words: str) -> None:
    with pytest.raises(UserError) as refusal:
        check_degree(model(tmp_path, num_attention_heads=4, num_key_value_heads=2), tp, "worker")
    assert str(refusal.value) == words


@pytest.mark.parametrize("text", ["{", "[1]", "7", pytest.param("[" * 100_000, id="nested")])
def test_a_broken_model_configuration_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="not a JSON object"):
        check_degree(tmp_path, 1, "worker")


@pytest.mark.parametrize(
    "arguments",
    [
        {"tp_size": 2},
        {"nnodes": 2},
        {"pp_size": 2},
        {"dp_size": 2},
        {"enable_dp_attention": True},
        {"attn_cp_size": 2},
        {"dcp_size": 2},
        {"enable_prefill_cp": True},
        {"enable_kv_cache_sharding": True},
        {"speculative_algorithm": "EAGLE"},
        {"kv_cache_dtype": "nvfp4"},
        {"enable_hierarchical_cache": True},
        {"enable_lmcache": True},
        {"enable_flexkv": True},
        {"enable_session_radix_cache": True},
        {"dllm_algorithm": "LowConfidence"},
        {"attn_dp_size": 2},
        {"enable_hisparse": True},
        {"enable_unified_memory": True},
        {"enable_int8_mamba_checkpoint": True},
        {"enable_mamba_cache_stochastic_rounding": True},
        {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
        {"remote_instance_weight_loader_seed_instance_ip": "10.0.0.1"},
        {"enable_linear_replayssm": True},
        {"disaggregation_mode": "prefill"},
        {"enable_mixed_chunk": True},
        {"enable_mixed_chunk": False},
        {"enable_unified_cache_external_linker": False},
        {"unified_cache_external_linker_backend": "dynamic"},
        {"unified_cache_external_linker_config": {}},
    ],
)
def test_what_the_exchange_or_a_policy_cannot_follow_is_refused_by_name(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(UserError, match=rf"^worker: --engine-args: {name}=") as refusal:
        check_arguments({"chunked_prefill_size": 512, **arguments}, "worker")
    assert "\n" not in str(refusal.value)


def test_other_arguments_pass() -> None:
    check_arguments({"pp_size": 1, "kv_cache_dtype": "fp8_e4m3", "speculative_algorithm": None, "max_running": 4}, "w")


def test_a_page_size_that_was_never_tried_is_refused_with_a_way_to_try_it() -> None:
    for page_tokens in (16, 32, 64):
        check_page_size(page_tokens, "worker")
    with pytest.raises(UserError) as refusal:
        check_page_size(8, "worker")
    assert str(refusal.value) == (
        "worker: --page-size 8 was never tried with the KV store; use one of: 16, 32, 64, or try it with "
        "--allow-untested"
    )
