"""Analytic profiles: predicted times of a model on a GPU, from published figures and a few efficiency factors.

A pass over n tokens takes the longer of two times: reading the weights, or multiplying with them. A dense model reads
all weights. A mixture reads those of the experts that n tokens are expected to choose. Attention and the reading of KV
are added. The curve is sampled where it bends and becomes a piecewise linear profile. Tensor parallelism divides work
and weights by `tp` and adds two all-reduces of the activations per layer.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil

from ampd.perf.gpus import HOST_LINK_SHARE, Gpu
from ampd.perf.model_shape import Attention, ModelShape, Weights
from ampd.perf.profile import (
    DecodeCurve,
    MixedPassCosts,
    ParallelismCurves,
    PerformanceProfile,
    Piece,
    PrefillCurve,
    PrefillSegment,
    Provenance,
    TransferCurve,
)

CALCULATED_PASSES = {"calculated": MixedPassCosts(saved=1.0)}
"""Mixed passes of an engine that is not measured: all that one reading of the weights saves. No engine believes it."""

# -- the KV memory of a replica: the memory that its weights leave free


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """The part of a GPU's memory for weights and KV: a share of it, minus a reserve for activations and graphs."""

    usable_share: float = 0.9
    reserve_bytes: float = 2e9


MEMORY_SHARE = MemoryShare()


def kv_capacity_tokens(shape: ModelShape, gpu: Gpu, tp: int, share: MemoryShare = MEMORY_SHARE) -> int:
    """KV tokens of one replica beside its weights; 0 or negative: the weights leave no room."""
    free_bytes = share.usable_share * gpu.memory_bytes - share.reserve_bytes - shape.weight_bytes / tp
    return int(free_bytes // shape.device_bytes_per_token(tp))


_Curve = Callable[[int], float]
_POWERS = tuple(2**power for power in range(13))
_SAME_SLOPE = 0.02
"""Adjacent pieces are merged if their slopes differ by less, relative to the steeper one."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peaks that are reached, and fixed costs; recorded in the profile's provenance."""

    matmul_flops_share: float = 0.65
    expert_flops_share: float = 0.35
    attention_flops_share: float = 0.4
    memory_share: float = 0.75
    link_share: float = 0.7
    network_share: float = 0.8
    forward_s: float = 1.0e-3
    expert_layer_s: float = 3.0e-5
    all_reduce_s: float = 1.0e-5
    transfer_s: float = 1.0e-3
    host_link_share: float = HOST_LINK_SHARE


@dataclass(frozen=True, slots=True)
class _Replica:
    """A model on `tp` GPUs."""

    shape: ModelShape
    gpu: Gpu
    tp: int
    efficiency: Efficiency

    @property
    def memory_bytes_per_s(self) -> float:
        return self.tp * self.gpu.memory_bytes_per_s * self.efficiency.memory_share

    @property
    def attention_flops_per_s(self) -> float:
        return self.tp * self.gpu.flops_per_s * self.efficiency.attention_flops_share

    @property
    def multiply_s_per_token(self) -> float:
        """Multiplying with the active matrices of the layers, each format at its own peak."""
        dense_s = sum(count * self._peak_s(layer.weights) for layer, count in self.shape.layers)
        experts_s = sum(
            count * layer.experts.active * self._peak_s(layer.experts.each)
            for layer, count in self.shape.layers
            if layer.experts
        )
        return dense_s / self.efficiency.matmul_flops_share + experts_s / self.efficiency.expert_flops_share

    def _peak_s(self, matrices: Iterable[Weights]) -> float:
        """Multiplying a token with matrices at the peak."""
        return sum(2 * each.parameters / (self.tp * self.gpu.flops_for(each.format)) for each in matrices)

    @property
    def mixing_s_per_token(self) -> float:
        """A token's attention within windows in a prefill, and its changes of the states."""
        windows = sum(count * each.window * each.pair_flops for each, count in self.shape.attention())
        states = sum(count * layer.state_flops for layer, count in self.shape.layers)
        return (windows + states) / self.attention_flops_per_s

    @property
    def attention_s_per_pair(self) -> float:
        flops = sum(count * each.pair_flops for each, count in self.shape.attention() if not each.window)
        return flops / self.attention_flops_per_s

    def step_s_per_token(self, attention: Attention) -> float:
        """A decode step's attention to one token: it reads the KV, or computes if that takes longer."""
        read_bytes = attention.kv_bytes / min(self.tp, attention.kv_heads)
        read_s = read_bytes / (self.gpu.memory_bytes_per_s * self.efficiency.memory_share)
        return max(read_s, attention.step_pair_flops / self.attention_flops_per_s)

    @property
    def context_s_per_token(self) -> float:
        """A decode step's work for each token of context."""
        return sum(count * self.step_s_per_token(each) for each, count in self.shape.attention() if not each.window)

    @property
    def sequence_s(self) -> float:
        """A decode step's work for each sequence: attention within windows; reading and writing states."""
        windows = sum(count * each.window * self.step_s_per_token(each) for each, count in self.shape.attention())
        states = sum(count * layer.state_bytes for layer, count in self.shape.layers)
        return windows + 2 * states / self.memory_bytes_per_s

    @property
    def history_s_per_token(self) -> float:
        """A prefill's work for each token of history beside attention: its KV is read, and expanded if it is latent."""
        read_bytes = sum(
            count * each.kv_bytes / min(self.tp, each.kv_heads)
            for each, count in self.shape.attention()
            if not each.window
        )
        flops = sum(count * each.history_flops for each, count in self.shape.attention())
        return read_bytes / (self.gpu.memory_bytes_per_s * self.efficiency.memory_share) + flops / (
            self.tp * self.gpu.flops_per_s * self.efficiency.matmul_flops_share
        )

    @property
    def fixed_s(self) -> float:
        reduces = self.shape.reduces if self.tp > 1 else 0
        experts_s = sum(count for layer, count in self.shape.layers if layer.experts) * self.efficiency.expert_layer_s
        return self.efficiency.forward_s + experts_s + reduces * self.efficiency.all_reduce_s

    @property
    def exchange_s_per_token(self) -> float:
        """All-reduces of one token's 16-bit activations: a ring moves 2 (tp - 1) / tp of them over each link."""
        activation_bytes = self.shape.reduces * self.shape.hidden * 2
        link_bytes_per_s = self.gpu.link_bytes_per_s * self.efficiency.link_share
        return activation_bytes * 2 * (self.tp - 1) / self.tp / link_bytes_per_s

    def pass_s(self, tokens: float, outputs: float) -> float:
        """A pass over `tokens` tokens that computes logits for `outputs` of them, without attention."""
        shape = self.shape
        read_s = (shape.read_bytes(tokens) + shape.output_bytes) / self.memory_bytes_per_s
        output_flops_per_s = self.tp * self.gpu.flops_per_s * self.efficiency.matmul_flops_share
        multiply_s = tokens * self.multiply_s_per_token + outputs * 2 * shape.output_parameters / output_flops_per_s
        return max(read_s, multiply_s) + self.fixed_s + tokens * self.exchange_s_per_token

    @property
    def knee_tokens(self) -> int:
        """Up to this number of tokens, reading all weights takes longer than multiplying with them."""
        read_s = (self.shape.read_bytes(1e9) + self.shape.output_bytes) / self.memory_bytes_per_s
        return max(1, ceil(read_s / self.multiply_s_per_token))


def analytic_profile(
    shape: ModelShape, gpu: Gpu, degrees: Sequence[int], date: datetime.date, efficiency: Efficiency | None = None
) -> PerformanceProfile:
    """The profile of `shape` on `gpu` for tensor-parallel `degrees`, with KV transfers among all of them."""
    efficiency = efficiency or Efficiency()
    parts = (asdict(gpu), asdict(efficiency), asdict(MEMORY_SHARE), _sizes(shape))
    return PerformanceProfile(
        provenance=Provenance(
            kind="analytic",
            source="ampd.perf.roofline",
            model=f"{shape.name}, {shape.formats}",
            gpu=gpu.name,
            date=date,
            method="Roofline from the published dimensions and peak figures below, times the shares that are assumed "
            "to be reached; not measured. A transfer uses the network cards of the smaller of the two replicas.",
            assumptions={key: value for part in parts for key, value in part.items() if key != "name"},
        ),
        workers=tuple(
            _curves(_Replica(shape, gpu, tp, efficiency), max(kv_capacity_tokens(shape, gpu, tp), 0)) for tp in degrees
        ),
        kv_transfers=tuple(transfer_curve(shape, gpu, a, b, efficiency) for a in degrees for b in degrees),
        kv_bytes_per_token=round(shape.kv_bytes_per_token) or None,
        host_link_bytes_per_s=gpu.host_bytes_per_s * efficiency.host_link_share,
        max_context_tokens=shape.max_context_tokens,
    )


def _sizes(shape: ModelShape) -> dict[str, float]:
    return {
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "weight_bytes": shape.weight_bytes,
        "sequence_bytes": shape.sequence_bytes,
    }


def _curves(replica: _Replica, capacity_tokens: int) -> ParallelismCurves:
    attention_s = _short(replica.attention_s_per_pair)
    # A prefill needs the logits of its last token only, a decode step those of every sequence.
    prefill = _pieces(replica, lambda tokens: replica.pass_s(tokens, 1) + tokens * replica.mixing_s_per_token)
    decode = _pieces(replica, lambda batch: replica.pass_s(batch, batch) + batch * replica.sequence_s)
    return ParallelismCurves(
        tp=replica.tp,
        prefill=PrefillCurve(
            history_s_per_token=_short(replica.history_s_per_token),
            segments=tuple(
                PrefillSegment(
                    from_incr_tokens=start, alpha_s=alpha_s, beta_s_per_token=beta_s, gamma_s_per_token2=attention_s
                )
                for start, alpha_s, beta_s in prefill
            ),
        ),
        decode=DecodeCurve.of(_short(replica.context_s_per_token), decode),
        mixed_passes=CALCULATED_PASSES,
        kv_capacity_tokens=capacity_tokens,
        kv_shards=replica.shape.kv_shards(replica.tp),
    )


def _pieces(replica: _Replica, seconds: _Curve) -> list[Piece]:
    """The pieces of a curve over tokens, sampled where it may bend."""
    knee = replica.knee_tokens
    knots = sorted({tokens for tokens in _POWERS if tokens < knee} | {1, knee, 2 * knee})
    times_s = [seconds(tokens) for tokens in knots]
    slopes_s = [
        (after_s - before_s) / (after - before)
        for before, after, before_s, after_s in zip(knots, knots[1:], times_s, times_s[1:], strict=False)
    ]
    pieces = [(0, max(times_s[0] - slopes_s[0], 0.0), slopes_s[0])]
    for start, slope_s in zip(knots[1:], slopes_s[1:], strict=False):
        before_s = pieces[-1][2]
        if abs(slope_s - before_s) > _SAME_SLOPE * max(slope_s, before_s):
            pieces.append((start, 0.0, slope_s))
    return [(start, _short(alpha_s), _short(max(slope_s, 0.0))) for start, alpha_s, slope_s in pieces]


def transfer_curve(
    shape: ModelShape, gpu: Gpu, tp_source: int, tp_target: int, efficiency: Efficiency
) -> TransferCurve:
    """Moving KV over the network cards of the smaller of two replicas."""
    bytes_per_s = min(tp_source, tp_target) * gpu.network_bytes_per_s * efficiency.network_share
    states_s = sum(count * layer.state_bytes for layer, count in shape.layers) / bytes_per_s
    windows = [(each.window, count * each.kv_bytes) for each, count in shape.attention() if each.frees]
    # Behind its window, KV of such a layer is not moved.
    slopes = [
        (start, shape.kv_bytes_per_token + sum(kv_bytes for window, kv_bytes in windows if window > start))
        for start in sorted({0, *(window for window, _ in windows)})
    ]
    alpha_s = _short(efficiency.transfer_s + states_s)
    line = [(start, alpha_s if start == 0 else 0.0, _short(slope / bytes_per_s)) for start, slope in slopes]
    return TransferCurve.of(tp_source, tp_target, line)


def _short(value: float) -> float:
    """Four significant digits, because the factors are not more precise."""
    return float(f"{value:.4g}")
