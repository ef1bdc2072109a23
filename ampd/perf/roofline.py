"""Analytic profiles: what a model should take on a GPU, from published figures and a few efficiency factors.

Each phase is bound by the larger of two times: reading weights and KV from memory, or computing. Both are straight
lines, so their maximum is a profile of two segments. Tensor parallelism divides work and weights by `tp` and adds two
all-reduces of the activations per layer.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil

from ampd.perf.profile import (
    DecodeCurve,
    DecodeSegment,
    ParallelismCurves,
    PerformanceProfile,
    PrefillCurve,
    PrefillSegment,
    Provenance,
    TransferCurve,
    TransferSegment,
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a dense decoder with gated MLPs and grouped-query attention."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    bytes_per_value: int = 2

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers' matrices, which every token is multiplied with."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value

    @property
    def attention_flops_per_pair(self) -> int:
        """Scores and weighted values for one token looking at one other, over all layers."""
        return 4 * self.layers * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published peak figures of an accelerator in its server."""

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peaks that are reached, and fixed costs; recorded in the profile's provenance."""

    matmul_flops_share: float = 0.65
    attention_flops_share: float = 0.4
    memory_share: float = 0.75
    link_share: float = 0.7
    network_share: float = 0.8
    forward_s: float = 1.0e-3
    all_reduce_s: float = 1.0e-5
    transfer_s: float = 1.0e-3


QWEN3_32B = ModelShape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600)

H20 = Gpu("NVIDIA H20", 148e12, 4.0e12, 450e9, 25e9)
"""Dense bf16; HBM3; NVLink in one direction; 200 GB/s InfiniBand of a server of 8, per GPU."""


def analytic_profile(
    shape: ModelShape, gpu: Gpu, degrees: Sequence[int], efficiency: Efficiency, date: datetime.date
) -> PerformanceProfile:
    """The profile of `shape` on `gpu` for tensor-parallel `degrees`, with KV transfers among all of them."""
    assumptions: dict[str, float | str] = {
        key: value for part in (shape, gpu, efficiency) for key, value in asdict(part).items() if key != "name"
    }
    return PerformanceProfile(
        provenance=Provenance(
            kind="analytic",
            source="ampd.perf.roofline",
            model=f"{shape.name}, {8 * shape.bytes_per_value}-bit",
            gpu=gpu.name,
            date=date,
            method="Roofline from the published dimensions and peak figures below, times the shares that are assumed "
            "to be reached; not measured. A transfer uses the network cards of the smaller of the two replicas.",
            assumptions=assumptions,
        ),
        workers=tuple(_curves(shape, gpu, tp, efficiency) for tp in degrees),
        kv_transfers=tuple(_transfer(shape, gpu, a, b, efficiency) for a in degrees for b in degrees),
    )


def _curves(shape: ModelShape, gpu: Gpu, tp: int, efficiency: Efficiency) -> ParallelismCurves:
    memory_bytes_per_s = tp * gpu.memory_bytes_per_s * efficiency.memory_share
    weights_s = shape.layer_parameters * shape.bytes_per_value / memory_bytes_per_s
    matmul_s = 2 * shape.layer_parameters / (tp * gpu.flops_per_s * efficiency.matmul_flops_share)
    attention_s = shape.attention_flops_per_pair / (tp * gpu.flops_per_s * efficiency.attention_flops_share)
    kv_read_s = shape.kv_bytes_per_token / memory_bytes_per_s
    fixed_s = efficiency.forward_s + (2 * shape.layers * efficiency.all_reduce_s if tp > 1 else 0.0)
    floor_s, exchange_s = _short(weights_s + fixed_s), _short(_exchange_s(shape, gpu, tp, efficiency))
    slope_s = _short(matmul_s) + exchange_s
    # Up to here reading the weights takes longer than multiplying with them.
    knee = max(1, ceil(weights_s / matmul_s))
    return ParallelismCurves(
        tp=tp,
        prefill=PrefillCurve(
            history_s_per_token=_short(kv_read_s),
            segments=(
                _prefill_segment(0, floor_s, exchange_s, _short(attention_s)),
                _prefill_segment(knee, 0.0, _short(slope_s), _short(attention_s)),
            ),
        ),
        decode=DecodeCurve(
            context_s_per_token=_short(kv_read_s),
            segments=(
                DecodeSegment(from_batch=0, alpha_s=floor_s, beta_s_per_sequence=exchange_s),
                DecodeSegment(from_batch=knee, alpha_s=0.0, beta_s_per_sequence=_short(slope_s)),
            ),
        ),
    )


def _prefill_segment(start: int, alpha_s: float, beta_s: float, gamma_s: float) -> PrefillSegment:
    return PrefillSegment(from_incr_tokens=start, alpha_s=alpha_s, beta_s_per_token=beta_s, gamma_s_per_token2=gamma_s)


def _exchange_s(shape: ModelShape, gpu: Gpu, tp: int, efficiency: Efficiency) -> float:
    """All-reduces of one token's activations: a ring moves 2 (tp - 1) / tp of them over each link."""
    activation_bytes = 2 * shape.layers * shape.hidden * shape.bytes_per_value
    return activation_bytes * 2 * (tp - 1) / tp / (gpu.link_bytes_per_s * efficiency.link_share)


def _transfer(shape: ModelShape, gpu: Gpu, tp_source: int, tp_target: int, efficiency: Efficiency) -> TransferCurve:
    bytes_per_s = min(tp_source, tp_target) * gpu.network_bytes_per_s * efficiency.network_share
    return TransferCurve(
        tp_source=tp_source,
        tp_target=tp_target,
        segments=(
            TransferSegment(
                from_tokens=0,
                alpha_s=_short(efficiency.transfer_s),
                beta_s_per_token=_short(shape.kv_bytes_per_token / bytes_per_s),
            ),
        ),
    )


def _short(value: float) -> float:
    """Four significant digits: more would pretend to a precision that the factors do not have."""
    return float(f"{value:.4g}")
