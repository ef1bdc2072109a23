"""Gated delta nets (Qwen3-Next) as a recurrence in plain torch, with SGLang's own pool of states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional


def install_gated_delta(patch: pytest.MonkeyPatch) -> None:
    """Let SGLang compute gated delta nets in this process without a GPU."""
    import sglang.srt.arg_groups.mamba_hook as mamba_hook
    import sglang.srt.models.qwen2_moe as qwen2_moe
    import sglang.srt.models.qwen3_next as qwen3_next
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    patch.setattr(mamba_hook, "_platform_supports_mamba_cache_extra_buffer", lambda: True)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    # The model's own torch path; it reads the head counts of `linear_num_{key,value}_heads_cpu`.
    patch.setattr(qwen3_next, "_is_cpu", True)
    patch.setattr(qwen3_next, "_is_amx_available", False)
    patch.setattr(qwen3_next.FusedRMSNormGated, "forward", _gated_norm)
    patch.setattr(qwen2_moe, "fused_gate_sigmoid_mul_add", _add_shared_expert)
    patch.setattr(GDNAttnBackend, "forward_extend", _extend)
    patch.setattr(GDNAttnBackend, "forward_decode", _decode)


def _gated_norm(norm: Any, x: Tensor, g: Tensor | None = None, **more: Any) -> Tensor:
    gate = more["z"] if g is None else g
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    return (scaled * functional.silu(gate.float())).to(x.dtype)


def _add_shared_expert(x: Tensor, gate: Tensor, shared: Tensor, output: Tensor) -> None:
    output += (torch.sigmoid(x.float() @ gate.float().flatten())[:, None] * shared.float()).to(output.dtype)


def _extend(backend: Any, layer: Any, forward_batch: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor:
    new = [int(tokens) for tokens in forward_batch.extend_seq_lens]
    fresh = [int(tokens) == 0 for tokens in forward_batch.extend_prefix_lens]
    tracked = forward_batch.mamba_track_aligned_lens()
    return _run(backend, layer, forward_batch, mixed_qkv, (a, b), new, fresh, tracked)


def _decode(backend: Any, layer: Any, forward_batch: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor:
    ones = [1] * len(forward_batch.seq_lens)
    fresh = [False] * len(ones)
    return _run(backend, layer, forward_batch, mixed_qkv, (a, b), ones, fresh, ones)


def _run(
    backend: Any,
    layer: Any,
    batch: Any,
    mixed: Tensor,
    gates: tuple[Tensor, Tensor],
    new: list[int],
    fresh: list[bool],
    tracked: Any,
) -> Tensor:
    """All sequences of a batch, whose tokens follow each other in `mixed` [tokens, channels]."""
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    slots = backend.forward_metadata.mamba_cache_indices
    a, b = (gate.reshape(mixed.shape[0], -1).float() for gate in gates)
    outputs, at = [], 0
    for number, tokens in enumerate(new):
        rows = slice(at, at + tokens)
        state = _State(cache, int(slots[number]), fresh[number])
        if batch.mamba_track_mask is not None and bool(batch.mamba_track_mask[number]):
            state.track(int(tracked[number]), int(batch.mamba_track_indices[number]))
        outputs.append(_sequence(layer, mixed[rows].float(), a[rows], b[rows], state))
        at += tokens
    return torch.cat(outputs).to(mixed.dtype)[None]


class _State:
    """The state of one sequence in a layer: the channels' last inputs, and a matrix per value head.

    SGLang keeps a second copy as it was after some tokens (`track`), because only states at the ends of pages can be
    reused.
    """

    def __init__(self, cache: Any, slot: int, fresh: bool) -> None:
        self._convolution, self._temporal = cache.conv[0], cache.temporal
        self._slot = slot
        self._fresh = fresh
        self._tracked: tuple[int, int] | None = None

    def track(self, tokens: int, slot: int) -> None:
        self._tracked = tokens, slot

    def inputs(self) -> Tensor:
        """[channel, last inputs]."""
        kept = self._convolution[self._slot].float()
        return torch.zeros_like(kept) if self._fresh else kept

    def matrices(self, heads: int, key_dim: int, value_dim: int) -> Tensor:
        """[head, key, value]."""
        kept = self._temporal[self._slot].float().reshape(heads, key_dim, value_dim)
        return torch.zeros_like(kept) if self._fresh else kept.clone()

    def keep(self, tokens: int, last: bool, matrices: Tensor, inputs: Tensor) -> None:
        """Keep the state after `tokens` of the new tokens where it is wanted."""
        slots = [self._slot] if last else []
        if self._tracked is not None and self._tracked[0] == tokens:
            slots.append(self._tracked[1])
        for slot in slots:
            self._temporal[slot] = matrices.reshape(self._temporal[slot].shape).to(self._temporal.dtype)
            self._convolution[slot] = inputs.to(self._convolution.dtype)


def _sequence(layer: Any, x: Tensor, a: Tensor, b: Tensor, state: _State) -> Tensor:
    """Outputs [token, value head, dim] of one sequence's new tokens `x` [token, channel]."""
    tokens = x.shape[0]
    weights = layer.conv_weights.float()
    past = weights.shape[-1] - 1
    inputs = torch.cat([state.inputs(), x.t()], 1)
    bias = None if layer.bias is None else layer.bias.float()
    mixed = functional.conv1d(inputs[None], weights[:, None, :], bias, groups=x.shape[1])[0].t()
    parts = torch.split(functional.silu(mixed), [layer.q_dim, layer.k_dim, layer.v_dim], -1)
    query, key = (part.reshape(tokens, layer.num_k_heads, layer.head_k_dim) for part in parts[:2])
    value = parts[2].reshape(tokens, layer.num_v_heads, layer.head_v_dim)
    repeats = layer.num_v_heads // layer.num_k_heads
    query, key = (_normalised(part).repeat_interleave(repeats, 1) for part in (query, key))
    query = query * layer.head_k_dim**-0.5
    decay = (-layer.A_log.float().exp() * functional.softplus(a + layer.dt_bias.float())).exp()
    rate = torch.sigmoid(b)
    matrices = state.matrices(layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    outputs = torch.empty_like(value)
    for token in range(tokens):
        matrices = matrices * decay[token][:, None, None]
        error = value[token] - torch.einsum("hkv,hk->hv", matrices, key[token])
        matrices = matrices + key[token][:, :, None] * (error * rate[token][:, None])[:, None, :]
        outputs[token] = torch.einsum("hkv,hk->hv", matrices, query[token])
        done = token + 1
        state.keep(done, done == tokens, matrices, inputs[:, done : done + past])
    return outputs


def _normalised(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + 1e-6)
