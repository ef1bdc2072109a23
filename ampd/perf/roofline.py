"""Analytic profiles: predicted times of a model on a GPU, from published figures and a few efficiency factors.

A pass over n tokens takes the longer of two times: reading the weights, or multiplying with them. A dense model reads
all weights. A mixture reads those of the experts that n tokens are expected to choose. Attention and the reading of KV
are added. The curve is sampled where it bends and becomes a piecewise linear profile. Tensor parallelism divides work
and weights by `tp` and adds two all-reduces of the activations per layer.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import ceil

from ampd.errors import UserError
from ampd.perf.model_shape import ModelShape
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

# -- presets of GPUs in their usual servers: published peaks, and assumptions about the network

_MIB = 2**20

HOST_LINK_SHARE = 0.8
"""The share of the peak between GPU and host that large copies are assumed to reach."""

PCIE_4_BYTES_PER_S = 32e9
PCIE_5_BYTES_PER_S = 64e9
"""A slot of 16 lanes, one direction."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak figures of an accelerator in its server.

    Attributes:
        flops_per_s: dense bf16 matrix operations.
        memory_bytes: as the driver reports it.
        link_bytes_per_s: to its peers in the server, one direction.
        network_bytes_per_s: to other servers, one direction; the GPU's share of the server's cards.
        host_bytes_per_s: to the memory of its host, one direction.
    """

    name: str
    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes_per_s: float


GPUS: dict[str, Gpu] = {
    "h20": Gpu("NVIDIA H20", 148e12, 97_871 * _MIB, 4.0e12, 450e9, 25e9, PCIE_5_BYTES_PER_S),
    "a100": Gpu("NVIDIA A100 SXM 80 GB", 312e12, 81_920 * _MIB, 2.039e12, 300e9, 25e9, PCIE_4_BYTES_PER_S),
    "h100": Gpu("NVIDIA H100 SXM", 989.4e12, 81_559 * _MIB, 3.35e12, 450e9, 50e9, PCIE_5_BYTES_PER_S),
    "h800": Gpu("NVIDIA H800 SXM", 989.4e12, 81_559 * _MIB, 3.35e12, 200e9, 50e9, PCIE_5_BYTES_PER_S),
    "h200": Gpu("NVIDIA H200 SXM", 989.4e12, 143_771 * _MIB, 4.8e12, 450e9, 50e9, PCIE_5_BYTES_PER_S),
    "l40s": Gpu("NVIDIA L40S", 362e12, 46_068 * _MIB, 0.864e12, 32e9, 25e9, PCIE_4_BYTES_PER_S),
    "b200": Gpu("NVIDIA B200 SXM", 2250e12, 183_359 * _MIB, 8.0e12, 900e9, 50e9, PCIE_5_BYTES_PER_S),
}
"""Compute, memory and links as the vendor publishes them (L40S: PCIe 4.0 x16, it has no NVLink).

The network is an assumption: 400 Gb/s a GPU, 200 Gb/s for A100 and L40S, and for H20 as in arXiv 2602.14516.
Host memory is reached over the PCIe generation of the card.
"""


def host_bytes_per_s(description: str) -> float:
    """The peak rate between a GPU and its host, one direction, by the PCIe generation of the preset that a text names.

    For any other accelerator it is that of PCIe 4.0.
    """
    name = preset_of(description)
    return GPUS[name].host_bytes_per_s if name else PCIE_4_BYTES_PER_S


def preset_of(description: str) -> str | None:
    """The name of the preset that a text names, such as a GPU's name in the driver; None: none."""
    words = re.findall(r"[a-z0-9]+", description.lower())
    return next((word for word in words if word in GPUS), None)


def gpu(name: str) -> Gpu:
    """A GPU by the name of its preset.

    Raises:
        UserError: an unknown name; the known ones are listed.
    """
    if found := GPUS.get(name.lower()):
        return found
    raise UserError(f"unknown GPU {name!r}; known: {', '.join(sorted(GPUS))}")


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
    return int(free_bytes // (shape.kv_bytes_per_token / shape.kv_shards(tp)))


_Curve = Callable[[int], float]
_POWERS = tuple(2**power for power in range(13))
_SAME_SLOPE = 0.02
"""Adjacent pieces are merged if their slopes differ by less, relative to the steeper one."""


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
    def matmul_flops_per_s(self) -> float:
        return self.tp * self.gpu.flops_per_s * self.efficiency.matmul_flops_share

    @property
    def attention_s_per_pair(self) -> float:
        flops_per_s = self.tp * self.gpu.flops_per_s * self.efficiency.attention_flops_share
        return self.shape.attention_flops_per_pair / flops_per_s

    @property
    def kv_read_s_per_token(self) -> float:
        per_gpu_bytes = self.shape.kv_bytes_per_token / self.shape.kv_shards(self.tp)
        return per_gpu_bytes / (self.gpu.memory_bytes_per_s * self.efficiency.memory_share)

    @property
    def fixed_s(self) -> float:
        reduces = 2 * self.shape.layers if self.tp > 1 else 0
        return self.efficiency.forward_s + reduces * self.efficiency.all_reduce_s

    @property
    def exchange_s_per_token(self) -> float:
        """All-reduces of one token's activations: a ring moves 2 (tp - 1) / tp of them over each link."""
        activation_bytes = 2 * self.shape.layers * self.shape.hidden * self.shape.bytes_per_value
        link_bytes_per_s = self.gpu.link_bytes_per_s * self.efficiency.link_share
        return activation_bytes * 2 * (self.tp - 1) / self.tp / link_bytes_per_s

    def pass_s(self, tokens: float, outputs: float) -> float:
        """A pass over `tokens` tokens that computes logits for `outputs` of them, without attention."""
        shape = self.shape
        output_bytes = shape.output_parameters * shape.bytes_per_value
        read_s = (shape.read_bytes(tokens) + output_bytes) / self.memory_bytes_per_s
        flops = 2 * (tokens * shape.active_parameters + outputs * shape.output_parameters)
        return max(read_s, flops / self.matmul_flops_per_s) + self.fixed_s + tokens * self.exchange_s_per_token

    @property
    def knee_tokens(self) -> int:
        """Up to this number of tokens, reading all weights takes longer than multiplying with them."""
        per_token_s = 2 * self.shape.active_parameters / self.matmul_flops_per_s
        read_s = (self.shape.read_bytes(1e9) + self.shape.output_parameters * self.shape.bytes_per_value) / (
            self.memory_bytes_per_s
        )
        return max(1, ceil(read_s / per_token_s))


def analytic_profile(
    shape: ModelShape, gpu: Gpu, degrees: Sequence[int], date: datetime.date, efficiency: Efficiency | None = None
) -> PerformanceProfile:
    """The profile of `shape` on `gpu` for tensor-parallel `degrees`, with KV transfers among all of them."""
    efficiency = efficiency or Efficiency()
    parts = (shape, gpu, efficiency, MEMORY_SHARE)
    return PerformanceProfile(
        provenance=Provenance(
            kind="analytic",
            source="ampd.perf.roofline",
            model=f"{shape.name}, {8 * shape.bytes_per_value}-bit",
            gpu=gpu.name,
            date=date,
            method="Roofline from the published dimensions and peak figures below, times the shares that are assumed "
            "to be reached; not measured. A transfer uses the network cards of the smaller of the two replicas.",
            assumptions={key: value for part in parts for key, value in asdict(part).items() if key != "name"},
        ),
        workers=tuple(
            _curves(_Replica(shape, gpu, tp, efficiency), max(kv_capacity_tokens(shape, gpu, tp), 0)) for tp in degrees
        ),
        kv_transfers=tuple(transfer_curve(shape, gpu, a, b, efficiency) for a in degrees for b in degrees),
        kv_bytes_per_token=shape.kv_bytes_per_token,
        host_link_bytes_per_s=gpu.host_bytes_per_s * efficiency.host_link_share,
        max_context_tokens=shape.max_context_tokens,
    )


def _curves(replica: _Replica, capacity_tokens: int) -> ParallelismCurves:
    attention_s, kv_read_s = _short(replica.attention_s_per_pair), _short(replica.kv_read_s_per_token)
    # A prefill needs the logits of its last token only, a decode step those of every sequence.
    prefill = _pieces(replica, lambda tokens: replica.pass_s(tokens, 1))
    decode = _pieces(replica, lambda batch: replica.pass_s(batch, batch))
    return ParallelismCurves(
        tp=replica.tp,
        prefill=PrefillCurve(
            history_s_per_token=kv_read_s,
            segments=tuple(
                PrefillSegment(
                    from_incr_tokens=start, alpha_s=alpha_s, beta_s_per_token=beta_s, gamma_s_per_token2=attention_s
                )
                for start, alpha_s, beta_s in prefill
            ),
        ),
        decode=DecodeCurve.of(kv_read_s, decode),
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
    line = (0, _short(efficiency.transfer_s), _short(shape.kv_bytes_per_token / bytes_per_s))
    return TransferCurve.of(tp_source, tp_target, [line])


def _short(value: float) -> float:
    """Four significant digits, because the factors are not more precise."""
    return float(f"{value:.4g}")
