"""SGLang's KV pools as records, and as tensors [slot, head, ...]; the refusal of those that were never tried.

Only the classes named here are taken, not their subclasses: a subclass may arrange its memory differently. Arguments
that the exchange cannot follow are refused earlier, in `workers.engines.sglang_settings`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from torch import Tensor

from workers.kv.shared import (
    TRIED_DEGREES,
    TRIED_PAGE_TOKENS,
    TRIED_STATE_TYPES,
    TRIED_TYPES,
    KvGeometry,
    PoolGeometry,
    Section,
    head_share,
)


@dataclass(frozen=True, slots=True)
class PoolBuffers:
    """One pool in the memory of one rank.

    Attributes:
        layer_ids: for each layer of the pool, its number in the model.
        sections: for each section of a record, for each layer of the pool, the tensors whose bytes follow each other in
            the record. Shape [slot, head of this rank, ...]; a slot is a page of tokens or one state.
    """

    layer_ids: tuple[int, ...]
    sections: Mapping[str, Sequence[Sequence[Tensor]]]

    def first_layers(self) -> Iterator[Tensor]:
        """The tensors of the first layer of each section. Those of the other layers are like them."""
        for layers in self.sections.values():
            yield from layers[0]


def attention_buffers(keys: Sequence[Tensor], values: Sequence[Tensor], page_size: int, layer_ids: Any) -> PoolBuffers:
    """K and V of multi-head or grouped-query attention, per layer [token slot, head, dim]."""
    layers = [tuple(_pages(part, page_size) for part in pair) for pair in zip(keys, values, strict=True)]
    return PoolBuffers(tuple(layer_ids), {"kv": layers})


def latent_buffers(latents: Sequence[Tensor], page_size: int, layer_ids: Any) -> PoolBuffers:
    """The latent vectors of MLA, per layer [token slot, 1, dim]. Every rank holds the same."""
    return PoolBuffers(tuple(layer_ids), {"latent": [(_pages(latent, page_size),) for latent in latents]})


def state_buffers(
    temporal: Tensor, convolution: Tensor, channels: Mapping[str, tuple[int, int]], layer_ids: Any
) -> PoolBuffers:
    """States of linear attention.

    Args:
        temporal: [layer, slot, value head, ...].
        convolution: [layer, slot, channel, width]. On a rank its channels are those of the rank's heads of q, then of
            k, then of v, so that ranks cannot be joined by putting their channels one after the other.
        channels: for q, k and v: heads on this rank, and channels per head.

    Raises:
        ValueError: the convolution has other channels.
    """
    sections: dict[str, list[tuple[Tensor, ...]]] = {"temporal": [(layer,) for layer in temporal]}
    at = 0
    for name, (heads, width) in channels.items():
        rows = slice(at, at + heads * width)
        at += heads * width
        if at <= convolution.shape[2]:
            sections[f"conv_{name}"] = [(layer[:, rows].unflatten(1, (heads, width)),) for layer in convolution]
    if at != convolution.shape[2]:
        raise ValueError(f"the convolution has {convolution.shape[2]} channels on a rank, but q, k and v have {at}")
    return PoolBuffers(tuple(layer_ids), sections)


def pool_geometry(name: str, buffers: PoolBuffers, heads: Mapping[str, int], window_pages: int = 0) -> PoolGeometry:
    """The records of a pool. `heads`: of the whole model, by section."""
    sections = [
        Section(section, heads[section], len(layers), sum(head_bytes(part) for part in layers[0]))
        for section, layers in buffers.sections.items()
    ]
    return PoolGeometry(name, tuple(sections), window_pages)


def head_bytes(tensor: Tensor) -> int:
    """Bytes of one head in one slot of a tensor [slot, head, ...]."""
    return math.prod(int(size) for size in tensor.shape[2:]) * int(tensor.element_size())


def _pages(buffer: Tensor, page_size: int) -> Tensor:
    """[token slot, head, dim] as [page, head, token, dim]; tokens behind the last whole page are left out."""
    pages = buffer.shape[0] // page_size
    return buffer[: pages * page_size].unflatten(0, (pages, page_size)).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class EnginePools:
    """All pools of a rank.

    Attributes:
        buffers: by pool, as `geometry` names them.
        layers: of the model, on which SGLang waits one by one.
        tp: ranks of the engine.
    """

    geometry: KvGeometry
    buffers: dict[str, PoolBuffers]
    layers: int
    tp: int


def engine_pools(server_args: Any, params: Any, model_config: Any, fingerprint: str) -> EnginePools:
    """Describe the pools of a rank's engine.

    Args:
        server_args: SGLang's arguments, as they are in effect.
        params: SGLang's `CacheInitParams`.
        model_config: SGLang's `ModelConfig` of the model. It has the head counts of the whole model, the pools have
            those of the rank.
        fingerprint: of the weights and settings; see `workers.kv.ranks.linker.engine_fingerprint`.

    Raises:
        ValueError: the store cannot hold the KV of this engine; one line says which part of it.
    """
    _check_division(server_args)
    _check_drafts(params)
    page_size, tp = int(params.page_size), int(server_args.tp_size)
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    reader = _PoolReader(model_config, page_size, tp)
    found = reader.pools(pool, params)
    # Records are bytes, which do not tell types of one size apart. SGLang holds both kinds of fp8 as bytes, too.
    types = [pool.dtype, *(tensor.dtype for _, buffers in found for tensor in buffers.first_layers())]
    kind = "/".join(map(str, (fingerprint, *types)))
    geometry = KvGeometry(sha256(kind.encode()).hexdigest(), page_size, tuple(pool for pool, _ in found))
    buffers = {pool.name: pool_buffers for pool, pool_buffers in found}
    return EnginePools(geometry, buffers, int(model_config.num_hidden_layers), tp)


def check_tried(pool: Any, page_tokens: int, tp: int, *, chunk_tokens: int | None = None) -> None:
    """Refuse KV that `engine_pools` describes, but that no engine was ever run with.

    Args:
        pool: SGLang's.
        page_tokens: per page, as in effect: SGLang's backends change what they were asked for.
        tp: ranks of the engine.
        chunk_tokens: of the chunks that some of the model's layers attend to instead of a window; None: no layer does.

    Raises:
        ValueError: one line says what it is, and how to try it.
    """
    how, kind = "try it with --allow-untested", type(pool).__name__
    if str(pool.dtype) not in TRIED_TYPES.get(kind, ()):
        raise ValueError(f"the KV store was never tried with a {kind} of the type {pool.dtype}; {how}")
    if (states := getattr(pool, "mamba_pool", None)) is not None:
        cache = states.mamba_cache
        for types, tensor in zip(TRIED_STATE_TYPES, (cache.temporal, cache.conv[0]), strict=True):
            if str(tensor.dtype) not in types:
                raise ValueError(f"the KV store was never tried with states of the type {tensor.dtype}; {how}")
    if chunk_tokens is not None and kind == "SWAKVPool":
        raise ValueError(f"the KV store was never tried with chunks of attention; {how}")
    full = type(getattr(pool, "full_kv_pool", None)).__name__
    if full == "MLATokenToKVPool":
        raise ValueError(f"the KV store was never tried with a {full} within a {kind}; {how}")
    if tp not in TRIED_DEGREES.get(kind, ()):
        raise ValueError(f"the KV store was never tried with a {kind} at --tp {tp}; {how}")
    if page_tokens not in TRIED_PAGE_TOKENS:
        raise ValueError(f"the KV store was never tried with pages of {page_tokens} tokens, as SGLang runs them; {how}")


_DIVISIONS = ("nnodes", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "dcp_size")
"""SGLang's further ways to divide a model, as they are in effect; some models choose them by themselves."""


def _check_division(server_args: Any) -> None:
    for name in _DIVISIONS:
        if (value := int(getattr(server_args, name, None) or 1)) > 1:
            raise ValueError(f"the KV store divides KV among ranks by heads only; set {name} to 1, not {value}")


def _check_drafts(params: Any) -> None:
    for name in ("mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools"):
        if getattr(params, name, None):
            raise ValueError(f"the KV store does not work with the KV pools of a draft model ({name})")


class _PoolReader:
    """Reads SGLang's pools for a model at a TP."""

    def __init__(self, model_config: Any, page_size: int, tp: int) -> None:
        self._model = model_config
        self._page_size = page_size
        self._tp = tp

    def pools(self, pool: Any, params: Any) -> list[tuple[PoolGeometry, PoolBuffers]]:
        """The pools behind SGLang's pool: one for plain attention, two for hybrid models."""
        kind = type(pool).__name__
        heads = int(self._model.get_total_num_kv_heads())
        states = getattr(params.req_to_token_pool, "mamba_pool", None)
        if states is not None and kind != "HybridLinearKVPool":
            raise ValueError(f"the KV store does not know states ({type(states).__name__}) beside a {kind}")
        if kind == "SWAKVPool":
            full: list[int] = []
            window: list[int] = []
            for layer, (_, is_window) in sorted(pool.layers_mapping.items(), key=lambda item: item[1][0]):
                (window if is_window else full).append(layer)
            # SGLang retains this many pages before the end of a prefix, too.
            window_pages = -(-int(params.sliding_window_size) // self._page_size)
            window_heads = int(self._model.get_swa_num_kv_heads(1))
            return [
                self._attention("kv", pool.full_kv_pool, heads, full),
                self._attention("swa", pool.swa_kv_pool, window_heads, window, window_pages),
            ]
        if kind == "HybridLinearKVPool":
            mapping = pool.full_attention_layer_id_mapping
            attention = self._attention("kv", pool.full_kv_pool, heads, sorted(mapping, key=mapping.__getitem__))
            return [attention, self._states(states)]
        return [self._attention("kv", pool, heads, tuple(getattr(pool, "model_layer_ids", ())))]

    def _attention(
        self, name: str, pool: Any, heads: int, layer_ids: Sequence[int], window_pages: int = 0
    ) -> tuple[PoolGeometry, PoolBuffers]:
        kind = type(pool).__name__
        if kind not in ("MHATokenToKVPool", "MLATokenToKVPool"):
            raise ValueError(f"the KV store does not know the KV pool {kind}")
        for scales in ("k_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer"):
            if getattr(pool, scales, None) is not None:
                raise ValueError(f"the KV store does not work with a quantised KV cache ({kind} has a {scales})")
        if getattr(pool, "layer_shard_enabled", False):
            raise ValueError(f"the KV store does not work with a {kind} whose layers are spread over ranks")
        if kind == "MLATokenToKVPool":
            buffers, section, heads = latent_buffers(pool.kv_buffer, self._page_size, layer_ids), "latent", 1
        else:
            if pool.kv_cache_layout != "nhd":
                raise ValueError(f"the KV store needs KV in the layout nhd, not {pool.kv_cache_layout}")
            buffers = attention_buffers(pool.k_buffer, pool.v_buffer, self._page_size, layer_ids)
            section = "kv"
        return self._checked(name, buffers, {section: heads}, window_pages)

    def _states(self, pool: Any) -> tuple[PoolGeometry, PoolBuffers]:
        kind, config = type(pool).__name__, self._model.hf_text_config
        names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
        if kind != "MambaPool" or any(getattr(config, name, None) is None for name in names):
            model = getattr(config, "model_type", "this model")
            raise ValueError(f"the KV store knows the states of gated delta nets only, not those of {model} ({kind})")
        key_heads, value_heads, key_dim, value_dim = (int(getattr(config, name)) for name in names)
        cache = pool.mamba_cache
        if any(getattr(cache, name, None) is not None for name in ("intermediate_ssm", "replayssm_g")):
            raise ValueError("the KV store does not work with states that speculative decoding or a replay keeps apart")
        if len(cache.conv) != 1 or getattr(pool, "_slot_siblings", None):
            raise ValueError(f"the KV store knows one convolution per state, not {len(cache.conv)} and further states")
        heads = {"temporal": value_heads, "conv_q": key_heads, "conv_k": key_heads, "conv_v": value_heads}
        keys, values = head_share(key_heads, self._tp, 0).count, head_share(value_heads, self._tp, 0).count
        channels = {"q": (keys, key_dim), "k": (keys, key_dim), "v": (values, value_dim)}
        buffers = state_buffers(cache.temporal, cache.conv[0], channels, pool.mamba_layer_ids)
        return self._checked("mamba", buffers, heads, window_pages=1)

    def _checked(
        self, name: str, buffers: PoolBuffers, heads: dict[str, int], window_pages: int
    ) -> tuple[PoolGeometry, PoolBuffers]:
        """A pool whose buffers have as many layers and heads as the model says."""
        for section, layers in buffers.sections.items():
            if not layers or len(layers) != len(buffers.layer_ids):
                raise ValueError(f"KV pool {name}: {len(layers)} layers of {section}, the model has other layers")
            wanted, found = head_share(heads[section], self._tp, 0).count, int(layers[0][0].shape[1])
            if found != wanted:
                raise ValueError(
                    f"KV pool {name}: SGLang holds {found} heads of {section} on a rank, but {heads[section]} heads at "
                    f"TP {self._tp} are {wanted}; the KV store does not work with padded heads"
                )
        return pool_geometry(name, buffers, heads, window_pages), buffers
