"""Analytic profiles: predicted times of a model on a GPU, from published figures and a few efficiency factors.

A pass over n tokens takes the longer of two times: reading the weights, or multiplying with them. A dense model reads
all weights. A mixture reads those of the experts that n tokens are expected to choose. Attention and the reading of KV
are added. The curve is sampled where it bends and becomes a piecewise linear profile. Tensor parallelism divides work
and weights by `tp` and adds two all-reduces of the activations per layer.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from ampd.perf.profile import (
    DecodeCurve,
    ParallelismCurves,
    PerformanceProfile,
    Piece,
    PrefillCurve,
    PrefillSegment,
    Provenance,
    TransferCurve,
)

# -- weights, KV and arithmetic of a decoder model, from its dimensions


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder with gated MLPs and grouped-query attention, dense or a mixture of experts.

    Attributes:
        intermediate: width of the MLP, of one expert's in a mixture.
        experts, active_experts: experts of a layer, and the number of them per token; 1 and 1 if dense.
        shared_intermediate: width of an MLP that works on every token beside the experts; 0: none.
        is_tied: embedding and output matrix are the same.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    max_context_tokens: int
    experts: int = 1
    active_experts: int = 1
    shared_intermediate: int = 0
    is_tied: bool = False
    bytes_per_value: int = 2

    @property
    def attention_parameters(self) -> int:
        """Attention matrices (and a router, if there are experts) of all layers."""
        projections = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.layers * (projections + router + 3 * self.hidden * self.shared_intermediate)

    @property
    def expert_parameters(self) -> int:
        """One expert of every layer; the whole MLP of a dense model."""
        return self.layers * 3 * self.hidden * self.intermediate

    @property
    def output_parameters(self) -> int:
        """The matrix from the last hidden state to the vocabulary."""
        return self.vocabulary * self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters of the layers that one token uses."""
        return self.attention_parameters + self.active_experts * self.expert_parameters

    @property
    def parameters(self) -> int:
        """All parameters except norms and biases."""
        embeddings = self.output_parameters * (1 if self.is_tied else 2)
        return self.attention_parameters + self.experts * self.expert_parameters + embeddings

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value

    @property
    def attention_flops_per_pair(self) -> int:
        """Scores and weighted values of one token's attention to one other token, over all layers."""
        return 4 * self.layers * self.heads * self.head_dim

    def read_bytes(self, tokens: float) -> float:
        """Bytes of layer weights that a pass over `tokens` tokens reads, with the expected number of chosen experts."""
        left_out = float((1.0 - self.active_experts / self.experts) ** tokens)
        chosen = self.experts * (1.0 - left_out)
        return (self.attention_parameters + chosen * self.expert_parameters) * self.bytes_per_value

    def kv_shards(self, tp: int) -> int:
        """Number of GPUs that split a replica's KV. With more GPUs than KV heads, the heads are replicated."""
        return min(tp, self.kv_heads)


# -- dimensions of a model from its Hugging Face `config.json`

_DEFAULT_CONTEXT = 32_768
_MOST = 1 << 40
"""A larger number is no dimension of a model, and could not be computed with."""
_TIED_BY_DEFAULT = ("gemma", "cohere")
"""Families whose files leave `tie_word_embeddings` out because their default is true."""

_UNGATED = {
    *("arcee", "bert", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt"),
    *("nemotron", "opt", "phi", "roberta", "starcoder2", "xlm-roberta"),
}
"""Families with an MLP of two matrices, where a gated one has three."""

_OTHER_MIXERS = (
    "attn_layer_period",
    "full_attention_interval",
    "hybrid_override_pattern",
    "linear_num_key_heads",
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
)
"""Fields of models in which layers without KV (state space, linear attention) do the work of attention."""

_SOFTMAX_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def read_model_shape(path: Path) -> ModelShape:
    """Read a config.json, or that of a model folder.

    Sliding windows count as full attention. Weights count as 16-bit values: engines load 32-bit weights as 16-bit,
    and the sizes of quantised weights are not derived.

    Raises:
        UserError: no such file, not a decoder with gated MLPs and attention, or a field that is missing or wrong.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot read the model's configuration ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{file}: not a JSON document") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: not a model's configuration: no object")
    name = path.resolve().name if path.is_dir() else file.resolve().parent.name
    text = config.get("text_config")
    return shape_of(text if isinstance(text, dict) and text else config, name, str(file))


def shape_of(config: dict[str, Any], name: str, where: str) -> ModelShape:
    """The shape that a configuration describes; `where`: its file, for errors.

    Raises:
        UserError: as `read_model_shape`.
    """
    _refuse_others(config, where)
    hidden, heads = _number(config, "hidden_size", where), _number(config, "num_attention_heads", where)
    head_dim = _first(config, where, ("head_dim",)) or hidden // heads
    if head_dim < 1:
        raise UserError(f"{where}: num_attention_heads ({heads}) exceeds hidden_size ({hidden})")
    intermediate = _number(config, "intermediate_size", where)
    experts, active = _experts(config, where)
    shared_intermediate = 0
    if experts > 1:
        intermediate = _first(config, where, ("moe_intermediate_size",)) or intermediate
        shared = _first(config, where, ("n_shared_experts", "moe_num_shared_experts")) or 0
        shared_intermediate = _first(config, where, ("shared_expert_intermediate_size",)) or shared * intermediate
    return ModelShape(
        name=name,
        layers=_number(config, "num_hidden_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=_first(config, where, ("num_key_value_heads",)) or heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocabulary=_number(config, "vocab_size", where),
        max_context_tokens=_first(config, where, ("max_position_embeddings",)) or _DEFAULT_CONTEXT,
        experts=experts,
        active_experts=active,
        shared_intermediate=shared_intermediate,
        is_tied=bool(config.get("tie_word_embeddings", str(config.get("model_type")).startswith(_TIED_BY_DEFAULT))),
    )


def _refuse_others(config: dict[str, Any], where: str) -> None:
    """Refuse models that a shape cannot describe, because a wrong profile looks like a correct one."""
    if config.get("kv_lora_rank"):
        raise UserError(f"{where}: latent attention (MLA) has another KV; no analytic model for it, measure a profile")
    kind = str(config.get("model_type"))
    layers = config.get("layer_types")
    others = set(map(str, layers)) - _SOFTMAX_LAYERS if isinstance(layers, list) else set()
    if others := others | {key for key in _OTHER_MIXERS if config.get(key)}:
        raise UserError(
            f"{where}: layers without KV ({', '.join(sorted(others))}); no model of them, measure a profile"
        )
    if kind in _UNGATED or config.get("is_encoder_decoder"):
        raise UserError(f"{where}: {kind} is no decoder with gated MLPs; no analytic model for it, measure a profile")
    for key in ("decoder_sparse_step", "interleave_moe_layer_step"):
        if (_first(config, where, (key,)) or 1) > 1:
            raise UserError(f"{where}: {key} mixes dense layers and experts; no analytic model, measure a profile")


def _experts(config: dict[str, Any], where: str) -> tuple[int, int]:
    """Experts of a layer, and the number of them per token."""
    experts = _first(config, where, ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")) or 1
    if experts == 1:
        return 1, 1
    active = _first(config, where, ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k"))
    if active is None or active > experts:
        raise UserError(f"{where}: num_experts_per_tok must be from 1 to {experts} (given: {active})")
    return experts, active


def _number(config: dict[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        given = "it is missing" if value is None else f"given: {str(value)[:30]}"
        raise UserError(f"{where}: {key} must be a positive integer ({given}); is it a decoder's config.json?")
    return value


def _first(config: dict[str, Any], where: str, keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            if value > _MOST:
                raise UserError(f"{where}: {key} is beyond all models (given: {str(value)[:30]})")
            return value
    return None


# -- the times of a model on a GPU

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
