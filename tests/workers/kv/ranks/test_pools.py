"""SGLang's own pools, made on the CPU, as records and buffers. The imports of SGLang take most of the time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", exc_type=ImportError)
torch = pytest.importorskip("torch")

from workers.kv.ranks.copies import RankCopies  # noqa: E402
from workers.kv.ranks.pools import EnginePools, check_tried, engine_pools  # noqa: E402
from workers.kv.shared import mismatch  # noqa: E402

PAGE, SLOTS = 16, 64
COMMON: dict[str, Any] = {"page_size": PAGE, "device": "cpu", "enable_memory_saver": False}


def with_real_pools(test: Callable[..., None]) -> Callable[..., None]:
    for mark in (pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")):
        test = mark(test)
    return test


def mha(heads: int, *, kind: Any = None, dtype: Any = torch.bfloat16, **more: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    sizes = {"head_dim": 32, "layer_num": 3, **more}
    return (kind or MHATokenToKVPool)(SLOTS, dtype=dtype, head_num=heads, **COMMON, **sizes)


def mla() -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(SLOTS, dtype=torch.bfloat16, kv_lora_rank=64, qk_rope_head_dim=16, layer_num=3, **COMMON)


def sliding_window(heads: int, window_heads: int, dtype: Any = torch.bfloat16) -> Any:
    """As for Gemma 4: the window's layers have heads of their own number and sizes."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    layers = {"swa_attention_layer_ids": [0, 2, 3], "full_attention_layer_ids": [1, 4]}
    dims = {"head_dim": 32, "swa_head_num": window_heads, "swa_head_dim": 16, "swa_v_head_dim": 8, "v_head_dim": 24}
    return SWAKVPool(SLOTS, 32, dtype=dtype, head_num=heads, **COMMON, **layers, **dims)


def states(tp: int, temporal: Any = torch.float32, key_heads: int = 2, **more: Any) -> Any:
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import MambaPool

    value_heads = 2 * key_heads
    sizes = {"n_groups": key_heads, "num_heads": value_heads, "head_dim": 32, "state_size": 16, "conv_kernel": 4}
    shape = Mamba2StateShape.create(tp_world_size=tp, intermediate_size=value_heads * 32, **sizes)
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=temporal)
    cache_params = Mamba2CacheParams(shape=shape, layers=[0, 1, 3], dtype=dtype)
    return MambaPool(
        size=8, spec_state_size=8, cache_params=cache_params, mamba_layer_ids=[0, 1, 3], device="cpu", **more
    )


def hybrid(heads: int, state_pool: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    return HybridLinearKVPool(
        SLOTS, torch.bfloat16, PAGE, heads, 32, full_attention_layer_ids=[2], device="cpu", mamba_pool=state_pool
    )


GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "model_type": "qwen3_next",
}


def described(
    pool: Any, *, heads: int = 2, window_heads: int = 4, tp: int = 1, state_pool: Any = None, **more: Any
) -> EnginePools:
    settings = SimpleNamespace(**{"tp_size": tp, "nnodes": 1, "attn_cp_size": None, **more.pop("settings", {})})
    cache = {"sliding_window_size": 33, "page_size": PAGE, **more.pop("cache", {})}
    params = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        req_to_token_pool=SimpleNamespace(mamba_pool=state_pool),
        **cache,
    )
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: heads,
        get_swa_num_kv_heads=lambda tp: window_heads // tp,
        num_hidden_layers=5,
        hf_text_config=SimpleNamespace(**more.pop("config", GDN)),
    )
    assert not more
    return engine_pools(settings, params, model, "f")


def sections(pools: EnginePools) -> dict[str, tuple[int, int, int]]:
    return {
        f"{pool.name} {section.name}": (section.heads, section.layers, section.head_bytes)
        for pool in pools.geometry.pools
        for section in pool.sections
    }


@with_real_pools
def test_grouped_query_attention() -> None:
    pools = described(mha(2))
    assert sections(pools) == {"kv kv": (2, 3, 2 * PAGE * 32 * 2)}
    assert pools.buffers["kv"].layer_ids == (0, 1, 2)
    assert (pools.layers, pools.tp, pools.geometry.page_size) == (5, 1, PAGE)
    # SGLang's pool has a page more than its size: slot 0 takes what belongs to no request.
    key, value = pools.buffers["kv"].sections["kv"][0]
    assert tuple(key.shape) == tuple(value.shape) == (SLOTS // PAGE + 1, 2, PAGE, 32)


@with_real_pools
@pytest.mark.parametrize(("tp", "on_rank"), [(1, 2), (2, 1), (4, 1), (8, 1)])
def test_the_geometry_does_not_depend_on_tp(tp: int, on_rank: int) -> None:
    assert described(mha(on_rank), tp=tp).geometry == described(mha(2)).geometry


@with_real_pools
def test_types_of_one_size_do_not_mix() -> None:
    ours, theirs = (described(mha(2, dtype=dtype)) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
    assert sections(ours) == sections(theirs)
    assert "weights or settings differ" in (mismatch(ours.geometry, theirs.geometry) or "")


@with_real_pools
def test_states_of_types_of_one_size_do_not_mix() -> None:
    """SGLang takes the type from an argument, from the model's configuration, or from SGLANG_MAMBA_SSM_DTYPE."""
    pools = [states(1, dtype) for dtype in (torch.bfloat16, torch.float16)]
    ours, theirs = (described(hybrid(2, pool), state_pool=pool) for pool in pools)
    assert sections(ours) == sections(theirs)
    assert "weights or settings differ" in (mismatch(ours.geometry, theirs.geometry) or "")


@with_real_pools
def test_latent_attention_has_one_head_on_every_rank() -> None:
    tp1, tp2 = described(mla(), heads=16), described(mla(), heads=16, tp=2)
    assert sections(tp1) == {"kv latent": (1, 3, PAGE * 80 * 2)}
    assert tp1.geometry == tp2.geometry


@with_real_pools
def test_sliding_window() -> None:
    pools = described(sliding_window(2, 4))
    assert sections(pools) == {"kv kv": (2, 2, PAGE * (32 + 24) * 2), "swa kv": (4, 3, PAGE * (16 + 8) * 2)}
    assert [pool.window_pages for pool in pools.geometry.pools] == [0, 3], "33 tokens reach into three pages"
    assert {name: buffers.layer_ids for name, buffers in pools.buffers.items()} == {"kv": (1, 4), "swa": (0, 2, 3)}
    assert described(sliding_window(1, 1), tp=4).geometry == pools.geometry


@with_real_pools
def test_states_of_gated_delta_nets() -> None:
    found = {}
    for tp in (1, 2):
        state_pool = states(tp)
        found[tp] = described(hybrid(2 // tp, state_pool), state_pool=state_pool, tp=tp)
    assert sections(found[1]) == {
        "kv kv": (2, 1, 2 * PAGE * 32 * 2),
        "mamba temporal": (4, 3, 32 * 16 * 4),
        "mamba conv_q": (2, 3, 16 * 3 * 2),
        "mamba conv_k": (2, 3, 16 * 3 * 2),
        "mamba conv_v": (4, 3, 32 * 3 * 2),
    }
    assert found[1].geometry == found[2].geometry
    assert [pool.window_pages for pool in found[1].geometry.pools] == [0, 1]
    assert {name: buffers.layer_ids for name, buffers in found[1].buffers.items()} == {"kv": (2,), "mamba": (0, 1, 3)}


@with_real_pools
@pytest.mark.parametrize(("writers", "readers"), list(product((1, 2, 4), (1, 2, 4))))
def test_states_of_any_degree_are_loaded_at_any_other(writers: int, readers: int) -> None:
    """Through SGLang's own tensors, with the channels of a rank as SGLang's loader of the convolution picks them."""
    temporal, channels = torch.randn(3, 8, 32, 16), torch.randn(3, 4 * 16 + 4 * 16 + 8 * 32, 3).bfloat16()
    geometry = ranks_of_states(1)[0][1].geometry
    store = torch.zeros(geometry.pool("mamba").record_bytes, dtype=torch.uint8)
    for rank, (cache, pools) in enumerate(ranks_of_states(writers)):
        cache.temporal[:, 3] = temporal.chunk(writers, 1)[rank]
        cache.conv[0][:, 3] = channels_of(channels, writers, rank)
        RankCopies(geometry, pools.buffers, store, tp=writers, rank=rank, layers=5).write("mamba", [3], [0])
    for rank, (cache, pools) in enumerate(ranks_of_states(readers)):
        assert pools.geometry == geometry
        list(RankCopies(geometry, pools.buffers, store, tp=readers, rank=rank, layers=5).load({"mamba": ([5], [0])}))
        assert cache.temporal[:, 5].equal(temporal.chunk(readers, 1)[rank])
        assert cache.conv[0][:, 5].equal(channels_of(channels, readers, rank))


def ranks_of_states(tp: int) -> list[tuple[Any, EnginePools]]:
    """The states of each rank of an engine with 4 key heads, and all its pools."""
    config, ranks = {**GDN, "linear_num_key_heads": 4, "linear_num_value_heads": 8}, []
    for _ in range(tp):
        pool = states(tp, key_heads=4)
        ranks.append(
            (pool.mamba_cache, described(hybrid(4 // tp, pool), heads=4, state_pool=pool, tp=tp, config=config))
        )
    return ranks


def channels_of(channels: Any, tp: int, rank: int) -> Any:
    """A rank's channels of all layers, as SGLang divides the weights of the convolution over them."""
    from sglang.srt.layers.attention.mamba.mamba import mamba_v2_sharded_weight_loader

    load = mamba_v2_sharded_weight_loader([(4 * 16, 0, False), (4 * 16, 0, False), (8 * 32, 0, False)], tp, rank)
    mine = torch.empty(3, channels.shape[1] // tp, 3, dtype=channels.dtype)
    for layer, whole in zip(mine, channels, strict=True):
        load(layer, whole)
    return mine


@pytest.mark.parametrize("name", ["nnodes", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "dcp_size"])
def test_other_divisions_of_a_model_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"by heads only; set {name} to 1, not 2"):
        described(None, settings={name: 2})


def with_scales() -> Any:
    pool = mha(2)
    pool.k_scale_buffer = [torch.zeros(SLOTS)]
    return pool


@with_real_pools
def test_pools_that_were_never_tried_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool

    class OtherPool(MHATokenToKVPool):  # type: ignore[misc]
        """A subclass that SGLang may bring with another layout."""

    def refused(text: str, pool: Any, **more: Any) -> None:
        with pytest.raises(ValueError, match=text) as failure:
            described(pool, **more)
        assert "\n" not in str(failure.value)

    refused("does not know the KV pool OtherPool", mha(2, kind=OtherPool))
    refused("quantised KV cache .MHATokenToKVPool has a k_scale_buffer", with_scales())
    with monkeypatch.context() as patch:
        patch.setenv("SGLANG_USE_HND_KVCACHE", "1")
        refused("needs KV in the layout nhd, not hnd", mha(2))
    refused("KV pools of a draft model .mtp_draft_device_pools", mha(2), cache={"mtp_draft_device_pools": (1,)})
    refused(r"holds 1 heads of kv on a rank, but 4 heads at TP 2 are 2", mha(1), heads=4, tp=2)
    refused("3 heads cannot be divided over 2 ranks", mha(2), heads=3, tp=2)
    refused("does not know states .MambaPool. beside a MHATokenToKVPool", mha(2), state_pool=states(1))
    state_pool = states(1)
    refused(
        "knows the states of gated delta nets only, not those of nemotron_h",
        hybrid(2, state_pool),
        state_pool=state_pool,
        config={"model_type": "nemotron_h"},
    )
    state_pool = states(1, speculative_num_draft_tokens=2)
    refused("states that speculative decoding", hybrid(2, state_pool), state_pool=state_pool)
    shard = mla()
    shard.layer_shard_enabled = True
    refused("MLATokenToKVPool whose layers are spread over ranks", shard)
    with pytest.raises(ValueError, match="does not know the KV pool DSATokenToKVPool"):
        described(DSATokenToKVPool.__new__(DSATokenToKVPool))


@with_real_pools
def test_kv_that_no_engine_was_run_with_is_refused_with_a_way_to_try_it() -> None:
    check_tried(mha(2, dtype=torch.float8_e4m3fn), PAGE, 8)
    check_tried(hybrid(2, states(1)), 64, 2)
    latent = hybrid(2, states(1))
    latent.full_kv_pool = mla()
    for pool, words in (
        (mha(2, dtype=torch.float8_e5m2), "a MHATokenToKVPool of the type torch.float8_e5m2"),
        (sliding_window(2, 2, dtype=torch.float16), "a SWAKVPool of the type torch.float16"),
        (latent, "MLATokenToKVPool within a Hybrid"),
        (hybrid(2, states(1, temporal=torch.bfloat16)), "states of the type torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=words) as refusal:
            check_tried(pool, PAGE, 1)
        assert "--allow-untested" in str(refusal.value)
    window = sliding_window(2, 2)
    check_tried(window, PAGE, 1)
    with pytest.raises(ValueError, match="never tried with chunks of attention"):
        check_tried(window, PAGE, 1, chunk_tokens=8192)


@pytest.mark.parametrize(
    ("kind", "page_tokens", "tp", "words"),
    [
        ("MLATokenToKVPool", PAGE, 8, "a MLATokenToKVPool at --tp 8"),
        ("SWAKVPool", PAGE, 8, "a SWAKVPool at --tp 8"),
        ("HybridLinearKVPool", PAGE, 8, "a HybridLinearKVPool at --tp 8"),
        ("MLATokenToKVPool", 128, 1, "pages of 128 tokens"),  # some backends choose their own
    ],
)
def test_a_degree_and_a_page_size_in_effect_that_were_never_tried_are_refused(
    kind: str, page_tokens: int, tp: int, words: str
) -> None:
    pool = type(kind, (), {"dtype": torch.bfloat16})()
    check_tried(pool, PAGE, 2)
    with pytest.raises(ValueError, match=words) as refusal:
        check_tried(pool, page_tokens, tp)
    assert "--allow-untested" in str(refusal.value)
