"""What SGLang lacks on a CPU for MLA, attention sinks, sliding windows and gated delta nets, in plain torch.

Only arithmetic is replaced. Pools, allocators, the radix tree and the linker are SGLang's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.cpu_gated_delta import install_gated_delta
from tests.harness.engine_hooks import in_engine_processes

ENGINE_ARGUMENTS: dict[str, dict[str, Any]] = {
    # By default SGLang takes gigabytes for states.
    "qwen3_next": {"max_mamba_cache_size": 40, "mamba_radix_cache_strategy": "extra_buffer"},
}
"""SGLang's further arguments for a family."""

ENVIRONMENT: dict[str, dict[str, str]] = {
    # SGLang keeps the convolution of a state in bf16, whatever the model's type is. Then a context gives other
    # log-probabilities after each point at which a state was taken up again.
    "qwen3_next": {"SGLANG_MAMBA_CONV_DTYPE": "float32"},
}
"""SGLang's further variables for a family whose model is in fp32."""


@contextmanager
def cpu_family(family: str) -> Iterator[None]:
    """Let engines that start meanwhile compute a family of `tests.harness.tiny_families`.

    It goes inside `tests.harness.forked_engines.forked_engines`.
    """
    with pytest.MonkeyPatch.context() as patch, in_engine_processes(_install_for_good, family):
        install(family, patch)
        for name, value in ENVIRONMENT.get(family, {}).items():
            patch.setenv(name, value)
        yield


def _install_for_good(family: str) -> None:
    install(family, pytest.MonkeyPatch())


_installed: str | None = None
"""The family of this process. A fork has what its parent had installed."""


def install(family: str, patch: pytest.MonkeyPatch) -> None:
    """Change SGLang in this process as the family needs it, once."""
    if _installed == family:
        return
    patch.setattr(sys.modules[__name__], "_installed", family)
    if family in ("qwen3", "qwen3_moe", "mixtral"):
        return
    _attention(patch)
    if family == "deepseek_v3":
        _latent_attention(patch)
        _rotary_without_scaling(patch)
    if family in ("gpt_oss", "gemma_4"):
        import sglang.srt.arg_groups.model_hook as model_hook

        # Past the lists of backends that were made for these models: torch_native is none of them.
        patch.setattr(model_hook, "attention_backends_of", lambda _view: ("triton", "triton"))
    if family == "gpt_oss":
        _transposed_experts(patch)
    if family == "qwen3_next":
        install_gated_delta(patch)


def attention(
    query: Tensor, key: Tensor, value: Tensor, first: int, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Causal attention of one sequence.

    Args:
        query: [tokens, heads, dim]; the first token has position `first`.
        key, value: [all tokens, KV heads, dim].
        window: how many tokens back a token sees, if not all.
        sinks: [heads], logits that take attention from all tokens.
    """
    heads, tokens, context = query.shape[1], query.shape[0], key.shape[0]
    key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in (key, value))
    scores = torch.einsum("nhd,mhd->hnm", query.float(), key.float()) * scale
    at, of = torch.arange(first, first + tokens)[:, None], torch.arange(context)[None, :]
    seen = of <= at if window is None else (of <= at) & (of >= at - window)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(heads, 1, 1).expand(heads, tokens, 1)], -1)
    weights = torch.softmax(scores, -1)[..., :context]
    return torch.einsum("hnm,mhv->nhv", weights, value.float()).to(query.dtype)


def _attention(patch: pytest.MonkeyPatch) -> None:
    """Let SGLang's torch backend take sinks, pools of windows and the two parts of MLA's queries.

    By itself it reads the KV of windows at the places of the full pool.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def forward(backend: Any, q: Tensor, k: Any, v: Any, layer: Any, batch: Any, new: list[int], **more: Any) -> Tensor:
        pool = backend.token_to_kv_pool
        if more.get("q_rope") is not None:
            q = _joined(q, more["q_rope"], layer)
        if more.get("save_kv_cache", True) and k is not None:
            _save(backend, pool, k, v, layer, batch, more.get("k_rope"))
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        width = layer.sliding_window_size
        window = width if width is not None and width > -1 else None
        in_window = backend.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]
        outputs, at = [], 0
        for number, tokens in enumerate(new):
            context = int(batch.seq_lens[number])
            slots = backend.req_to_token_pool.req_to_token[batch.req_pool_indices[number], :context].long()
            if in_window:
                slots = pool.translate_loc_from_full_to_swa(slots).long()
            some = q[at : at + tokens]
            first = context - tokens
            outputs.append(attention(some, keys[slots], values[slots], first, layer.scaling, window, more.get("sinks")))
            at += tokens
        return torch.cat(outputs).reshape(at, -1)

    def extend(backend: Any, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **more: Any) -> Any:
        more |= {"save_kv_cache": args[0]} if args else {}
        new = [int(tokens) for tokens in forward_batch.extend_seq_lens]
        return forward(backend, q, k, v, layer, forward_batch, new, **more)

    def decode(backend: Any, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **more: Any) -> Any:
        more |= {"save_kv_cache": args[0]} if args else {}
        return forward(backend, q, k, v, layer, forward_batch, [1] * len(forward_batch.seq_lens), **more)

    patch.setattr(TorchNativeAttnBackend, "forward_extend", extend)
    patch.setattr(TorchNativeAttnBackend, "forward_decode", decode)


def _joined(latent: Tensor, rotary: Tensor, layer: Any) -> Tensor:
    """The two parts of MLA's queries as one, per head."""
    heads = (-1, layer.tp_q_head_num)
    parts = latent.reshape(*heads, layer.v_head_dim), rotary.reshape(*heads, layer.qk_head_dim - layer.v_head_dim)
    return torch.cat(parts, -1)


def _save(backend: Any, pool: Any, k: Tensor, v: Any, layer: Any, batch: Any, k_rope: Tensor | None) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    slots = batch.out_cache_loc
    if k_rope is None:
        pool.set_kv_buffer(layer, KVWriteLoc(slots, backend.swa_out_cache_loc), k, v)
        return
    latent = torch.cat([k.reshape(len(slots), 1, -1), k_rope.reshape(len(slots), 1, -1)], -1)
    buffer = pool.kv_buffer[layer.layer_id - pool.start_layer]
    buffer[slots] = latent.to(buffer.dtype)


def _latent_attention(patch: pytest.MonkeyPatch) -> None:
    """Let DeepSeek's models take MLA's absorbed form with the torch backend."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    handlers = AttentionBackendRegistry._handlers
    patch.setitem(handlers, "torch_native", lambda _attention, _batch: AttnForwardMethod.MLA)


def _rotary_without_scaling(patch: pytest.MonkeyPatch) -> None:
    """On a CPU SGLang makes rotary embeddings with scaling only."""
    import sglang.srt.layers.rotary_embedding.factory as factory

    original = factory.get_rope_wrapper

    def rope(*args: Any, rope_scaling: Any = None, device: Any = None, **more: Any) -> Any:
        scaling = args[5] if len(args) > 5 else rope_scaling
        if scaling is None:
            return factory.get_rope(*args, **more)
        options = {**more, "device": device} if len(args) > 5 else {**more, "rope_scaling": scaling, "device": device}
        return original(*args, **options)

    for module in list(sys.modules.values()):
        if vars(module).get("get_rope_wrapper") is original:
            patch.setattr(module, "get_rope_wrapper", rope)


def _transposed_experts(patch: pytest.MonkeyPatch) -> None:
    """The unquantised experts of gpt-oss lie [in, out]; SGLang's torch code for experts wants [out, in]."""
    import sglang.srt.layers.moe.fused_moe_native as native

    original = native.moe_forward_native

    class Transposed:
        def __init__(self, layer: Any) -> None:
            self._layer = layer
            self.w13_weight = layer.w13_weight.transpose(1, 2)
            self.w2_weight = layer.w2_weight.transpose(1, 2)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._layer, name)

    patch.setattr(native, "moe_forward_native", lambda layer, *args: original(Transposed(layer), *args))
