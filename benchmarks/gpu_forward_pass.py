"""The forward pass of one rank of a decoder on a GPU, with random weights: what a serving engine computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.this_gpu import DenseModel

BF16 = torch.bfloat16
DEVICE = "cuda"


@triton.jit
def _add_norm(x, residual, weight, out, width, has_residual: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    value = tl.load(x + row * width + at, inside, 0.0).to(tl.float32)
    if has_residual:
        value += tl.load(residual + row * width + at, inside, 0.0).to(tl.float32)
    tl.store(residual + row * width + at, value.to(tl.bfloat16), inside)
    scale = 1.0 / tl.sqrt(tl.sum(value * value) / width + 1e-6)
    weights = tl.load(weight + at, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + at, (value * scale * weights).to(tl.bfloat16), inside)


@triton.jit
def _silu_mul(x, out, width, block: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * block + tl.arange(0, block)
    inside = at < width
    gate = tl.load(x + row * 2 * width + at, inside, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), inside)


@triton.jit
def _rotate(qkv, table, first, stride, half: tl.constexpr, per_row: tl.constexpr):
    """Rotate the first vectors of each row. Each row is a token; positions grow by `per_row`."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, half)
    place = qkv + row * stride + head * 2 * half + at
    angles = table + (first + row * per_row) * 2 * half + at
    cos, sin = tl.load(angles), tl.load(angles + half)
    a, b = tl.load(place).to(tl.float32), tl.load(place + half).to(tl.float32)
    tl.store(place, (a * cos - b * sin).to(tl.bfloat16))
    tl.store(place + half, (b * cos + a * sin).to(tl.bfloat16))


Attention = Callable[[Any, Any, Any, int], Any]
"""From q [batch, new, head, dim], k and v [batch, context, KV head, dim], and the history's length."""


def flash(q: Any, k: Any, v: Any, _history: int) -> Any:
    """FlashAttention 2, which aligns the causal mask with the context's end."""
    causal = q.shape[1] > 1
    return torch.ops.aten._flash_attention_forward(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False)[0]


def cudnn(q: Any, k: Any, v: Any, history: int) -> Any:
    """cuDNN: the history without a mask and the new tokens with a causal one, then joined by their sums."""
    if q.shape[1] == 1:
        return _cudnn(q, k, v, causal=False)[0]
    out, sums = _cudnn(q, k[:, history:], v[:, history:], causal=True)
    if not history:
        return out
    old, old_sums = _cudnn(q, k[:, :history], v[:, :history], causal=False)
    share = torch.sigmoid(sums - old_sums).to(BF16)
    return torch.lerp(old, out, share)


def _cudnn(q: Any, k: Any, v: Any, *, causal: bool) -> tuple[Any, Any]:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    out, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    sums = sums.reshape(*q.shape[:3], 1)
    return out.transpose(1, 2), sums.transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {"flash": flash, "cudnn": cudnn}


@dataclass(frozen=True)
class Part:
    """Sequences of a pass, each with so many new tokens behind a history of so many.

    Attributes:
        first_kv_token: where their KV begins in the memory.
    """

    sequences: int
    new: int
    history: int
    attention: Attention
    first_kv_token: int = 0

    @property
    def tokens(self) -> int:
        return self.sequences * self.new

    @property
    def kv_tokens(self) -> int:
        return self.sequences * (self.history + self.new)


class Rank:
    """The weights of one rank, and memory for KV.

    Args:
        kv_tokens: of all sequences together.
        most_tokens: of the longest context.
    """

    def __init__(self, dense: DenseModel, tp: int, kv_tokens: int, most_tokens: int) -> None:
        self.dense, self.heads = dense, dense.heads // tp
        self.kv_heads, self.inner = max(1, dense.kv_heads // tp), dense.intermediate // tp
        hidden, dim = dense.shape.hidden, dense.head_dim
        self.vectors = self.heads + 2 * self.kv_heads
        self.layers = [
            tuple(
                matrix(rows, columns)
                for rows, columns in (
                    (self.vectors * dim, hidden),
                    (hidden, self.heads * dim),
                    (2 * self.inner, hidden),
                    (hidden, self.inner),
                )
            )
            for _ in range(dense.layers)
        ]
        self.embedding = matrix(dense.shape.vocabulary, hidden)
        self.output = matrix(dense.shape.vocabulary // tp, hidden)
        self.norm = torch.ones(hidden, dtype=BF16, device=DEVICE)
        self.table = torch.rand(most_tokens + 1, dim, device=DEVICE)
        self.kv = torch.zeros(dense.layers, 2, kv_tokens * self.kv_heads * dim, dtype=BF16, device=DEVICE)
        self.kv.normal_()

    def forward(self, tokens: Any, parts: Sequence[Part]) -> Any:
        """The next token of each sequence, by its logits.

        Args:
            tokens: [all new tokens], part by part and sequence by sequence.
            parts: each has its own KV. They share everything but the attention.
        """
        count = tokens.numel()
        x = self.embedding[tokens]
        residual, normed = torch.empty_like(x), torch.empty_like(x)
        self._add_norm(x, residual, normed, first=True)
        for layer, (qkv, out, up, down) in enumerate(self.layers):
            self._add_norm(self._attend(layer, normed @ qkv.T, parts) @ out.T, residual, normed)
            gated = torch.empty(count, self.inner, dtype=BF16, device=DEVICE)
            _silu_mul[(count, triton.cdiv(self.inner, 1024))](normed @ up.T, gated, self.inner, 1024)
            self._add_norm(gated @ down.T, residual, normed)
        rows = normed.split([part.tokens for part in parts])
        lasts = [each.view(part.sequences, part.new, -1)[:, -1] for each, part in zip(rows, parts, strict=True)]
        return (torch.cat(lasts) @ self.output.T).argmax(-1)

    def inputs(self, batch: int, new: int, context: int) -> tuple[Any, Any, Any]:
        """Random q, k and v of one layer, as `Attention` takes them."""
        dim = self.dense.head_dim
        sizes = ((new, self.heads), (context, self.kv_heads), (context, self.kv_heads))
        q, k, v = (torch.randn(batch, length, heads, dim, dtype=BF16, device=DEVICE) for length, heads in sizes)
        return q, k, v

    def _add_norm(self, x: Any, residual: Any, out: Any, *, first: bool = False) -> None:
        width = self.dense.shape.hidden
        _add_norm[(x.shape[0],)](x, residual, self.norm, out, width, not first, triton.next_power_of_2(width))

    def _attend(self, layer: int, qkv: Any, parts: Sequence[Part]) -> Any:
        rows = qkv.split([part.tokens for part in parts])
        attended = [self._attend_part(layer, mine, part) for mine, part in zip(rows, parts, strict=True)]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend_part(self, layer: int, qkv: Any, part: Part) -> Any:
        dim, history, context = self.dense.head_dim, part.history, part.history + part.new
        grid = (qkv.shape[0], self.heads + self.kv_heads)
        _rotate[grid](qkv, self.table, history, qkv.shape[1], dim // 2, int(part.sequences == 1))
        split = qkv.view(part.sequences, part.new, self.vectors, dim)
        q, k, v = split.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        width = self.kv_heads * dim
        memory = slice(part.first_kv_token * width, (part.first_kv_token + part.kv_tokens) * width)
        keys, values = (kv[memory].view(part.sequences, context, self.kv_heads, dim) for kv in self.kv[layer])
        keys[:, history:].copy_(k)
        values[:, history:].copy_(v)
        return part.attention(q, keys, values, history).reshape(part.tokens, -1)


def matrix(rows: int, columns: int) -> Any:
    """Random weights that keep activations within bounds."""
    weights = torch.empty(rows, columns, dtype=BF16, device=DEVICE)
    return weights.normal_(0.0, columns**-0.5)
