"""A decoder model as a table of its layers, from which weights, KV and arithmetic follow, and how it is read.

A model is a list of layers, of which many are equal. A layer has matrices that every token uses, maybe experts, and
attention or a state. Planner, engines and `ampd serve` all take their sizes from here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from ampd.perf.number_format import BF16, NumberFormat, Quantization

# -- weights, KV and arithmetic of a decoder model, from its layers

_WINDOW_SHARE = 0.8
"""Tokens in SGLang's pool for windows, per token in its pool for full attention (`swa_full_tokens_ratio`)."""
_STATE_SHARE = 0.9
"""Memory for states, relative to that for KV, as SGLang divides it (`mamba_full_memory_ratio`)."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The matrices of one layer, or of one expert, that are stored alike."""

    parameters: int
    format: NumberFormat

    @property
    def bytes(self) -> float:
        return self.parameters * self.format.bits / 8


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer, and the number of them that a token uses."""

    number: int
    active: int
    each: tuple[Weights, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer.

    Attributes:
        kv_heads: KV heads, which tensor parallelism divides; beyond their number GPUs hold copies.
        kv_bytes: KV of one token.
        pair_flops: of one token's attention to one other in a prefill.
        step_pair_flops: the same in a decode step, where latent attention stays in the latent space.
        history_flops: of a token of history per prefill, whose latent part is expanded again.
        window: the most tokens that a token attends to; 0: all.
        frees: KV behind the window is dropped.
    """

    kv_heads: int
    kv_bytes: float
    pair_flops: int
    step_pair_flops: int
    history_flops: int = 0
    window: int = 0
    frees: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer.

    Attributes:
        weights: matrices that every token uses.
        attention: usually one; sparse attention has a second one that chooses the tokens.
        state_bytes: of one sequence, in a layer that has a state in place of KV.
        state_flops: of one token's change of the state.
        reduces: sums over the GPUs of a replica in each pass.
        divisors: numbers of heads, and of blocks of quantised weights, that the degree must divide.
    """

    weights: tuple[Weights, ...]
    experts: Experts | None = None
    attention: tuple[Attention, ...] = ()
    state_bytes: int = 0
    state_flops: int = 0
    reduces: int = 2
    divisors: tuple[int, ...] = ()

    def bytes(self, experts: float) -> float:
        """With this number of experts, if the layer has any."""
        each = sum(weights.bytes for weights in self.experts.each) if self.experts else 0.0
        return sum(weights.bytes for weights in self.weights) + experts * each

    def chosen(self, tokens: float) -> float:
        """The expected number of experts that `tokens` tokens choose."""
        if self.experts is None:
            return 0.0
        left_out = float((1.0 - self.experts.active / self.experts.number) ** tokens)
        return self.experts.number * (1.0 - left_out)

    def active(self) -> Iterator[Weights]:
        """The matrices that one token uses."""
        return self._with(self.experts.active if self.experts else 0)

    def every(self) -> Iterator[Weights]:
        """All matrices."""
        return self._with(self.experts.number if self.experts else 0)

    def _with(self, experts: int) -> Iterator[Weights]:
        yield from self.weights
        for weights in self.experts.each if self.experts else ():
            yield replace(weights, parameters=experts * weights.parameters)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder.

    Attributes:
        layers: kinds of layers, each with the number of them.
        is_tied: embedding and output matrix are the same. Both are stored with 16 bits.
        kv_bits: of a value of KV.
    """

    name: str
    hidden: int
    vocabulary: int
    max_context_tokens: int
    layers: tuple[tuple[Layer, int], ...]
    is_tied: bool = False
    kv_bits: float = 16

    @property
    def has_experts(self) -> bool:
        return any(layer.experts for layer, _ in self.layers)

    @property
    def output_parameters(self) -> int:
        """The matrix from the last hidden state to the vocabulary."""
        return self.vocabulary * self.hidden

    @property
    def output_bytes(self) -> float:
        return Weights(self.output_parameters, BF16).bytes

    @property
    def active_parameters(self) -> int:
        """Parameters of the layers that one token uses."""
        return sum(count * weights.parameters for layer, count in self.layers for weights in layer.active())

    @property
    def parameters(self) -> int:
        """All parameters except norms and biases."""
        embeddings = self.output_parameters * (1 if self.is_tied else 2)
        return embeddings + sum(count * weights.parameters for weights, count in self._matrices())

    @property
    def weight_bytes(self) -> float:
        embeddings = self.output_bytes * (1 if self.is_tied else 2)
        return embeddings + sum(count * weights.bytes for weights, count in self._matrices())

    @property
    def formats(self) -> str:
        """How the weights of the layers are stored, most of them first."""
        sizes: Counter[str] = Counter()
        for weights, count in self._matrices():
            sizes[weights.format.name] += count * weights.parameters
        return " + ".join(name for name, _ in sizes.most_common())

    @property
    def kv_bytes_per_token(self) -> float:
        """KV of one more token in a long context."""
        return sum(count * attention.kv_bytes for attention, count in self.attention() if not attention.frees)

    @property
    def sequence_bytes(self) -> float:
        """What a sequence has beside its KV of each token: states, and the KV of windows."""
        states = sum(count * layer.state_bytes for layer, count in self.layers)
        return states + sum(
            count * attention.window * attention.kv_bytes for attention, count in self.attention() if attention.frees
        )

    @property
    def reduces(self) -> int:
        """Sums over the GPUs of a replica in each pass."""
        return sum(count * layer.reduces for layer, count in self.layers)

    def _matrices(self) -> Iterator[tuple[Weights, int]]:
        return ((weights, count) for layer, count in self.layers for weights in layer.every())

    def attention(self) -> Iterator[tuple[Attention, int]]:
        """Each attention, with the number of layers that have it."""
        return ((attention, count) for layer, count in self.layers for attention in layer.attention)

    def read_bytes(self, tokens: float) -> float:
        """Bytes of layer weights that a pass over `tokens` tokens reads, with the expected number of chosen experts."""
        return sum(count * layer.bytes(layer.chosen(tokens)) for layer, count in self.layers)

    def kv_shards(self, tp: int) -> int:
        """Number of GPUs that split a replica's KV. With more GPUs than KV heads, the heads are replicated."""
        return min(tp, max((each.kv_heads for each, _ in self.attention() if not each.frees), default=tp))

    def device_bytes_per_token(self, tp: int) -> float:
        """Memory of one GPU for each token of KV capacity, as SGLang divides it among its pools."""
        kv = sum(
            count * each.kv_bytes / min(tp, each.kv_heads) * (_WINDOW_SHARE if each.frees else 1.0)
            for each, count in self.attention()
        )
        return kv * (1 + _STATE_SHARE if any(layer.state_bytes for layer, _ in self.layers) else 1.0)

    def divides(self, tp: int) -> bool:
        """Whether the degree divides all heads. KV heads may be fewer: then GPUs hold copies."""
        kv_heads = {each.kv_heads for each, _ in self.attention()}
        return all(heads % tp == 0 for layer, _ in self.layers for heads in layer.divisors) and all(
            heads % tp == 0 or tp % heads == 0 for heads in kv_heads
        )


# -- the layers of a model from its Hugging Face `config.json`

_DEFAULT_CONTEXT = 32_768
_MOST = 1 << 40
"""A larger number is no dimension of a model, and could not be computed with."""
_MOST_LAYERS = 4096
_TIED_BY_DEFAULT = ("gemma", "cohere")
"""Families whose files leave `tie_word_embeddings` out because their default is true."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {"sliding_window_pattern": 6, "max_position_embeddings": 131_072, "vocab_size": 262_208},
    "cohere2": {"sliding_window_pattern": 4},
    "llama4_text": {"sliding_window_pattern": 4},
    "nemotron_h": {"mlp_matrices": 2},
    **{
        family: {"mlp_matrices": 2}
        for family in ("arcee", "falcon", "gpt_bigcode", "gpt_neox", "nemotron", "phi", "starcoder2")
    },
}
"""What files of a family leave out."""

WINDOW_POOLS = ("gpt_oss", "gemma4", "llama4", "mimo_v2", "step3p")
"""Families whose windows have a pool of their own in SGLang. It keeps all KV of the others."""

_UNKNOWN = (
    *("attn_layer_period", "block_configs", "compress_ratios", "linear_attn_config", "mamba_d_state"),
    *("sparse_attention_config", "state_size"),
)
"""Fields of models with layers that are not described here."""


QUANTIZATION_FILE = "hf_quant_config.json"
"""Where NVIDIA's Model Optimizer writes what others write into the configuration."""


def read_model_shape(path: Path, kv_bits: float = 0) -> ModelShape:
    """Read a config.json, or that of a model folder.

    Args:
        kv_bits: of a value of KV; 0: as the configuration says.

    Raises:
        UserError: no such file, not a decoder that can be described, or a field that is missing or wrong.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read_object(file)
    quantization = file.with_name(QUANTIZATION_FILE)
    if "quantization_config" not in config and quantization.is_file():
        config["quantization_config"] = _read_object(quantization).get("quantization")
    name = path.resolve().name if path.is_dir() else file.resolve().parent.name
    return shape_of(config, name, str(file), kv_bits)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot read the model's configuration ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{file}: not a JSON document") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: not a model's configuration: no object")
    return config


def shape_of(config: Mapping[str, Any], name: str, where: str, kv_bits: float = 0) -> ModelShape:
    """The shape that a configuration describes; `where`: its file, for errors.

    Raises:
        UserError: as `read_model_shape`.
    """
    text = config.get("text_config")
    text = text if isinstance(text, dict) and text else config
    fields = _Fields({**_DEFAULTS.get(str(text.get("model_type")), {}), **text}, where)
    _refuse_others(fields)
    quantization = Quantization.of(text.get("quantization_config") or config.get("quantization_config"), where)
    kinds = _kinds(fields)
    if not {_FULL, _WINDOW} & set(kinds):
        raise fields.wrong("no layer has KV; no analytic model for it, measure a profile")
    kv_bits = kv_bits or quantization.kv_bits
    parts = _Parts(fields, quantization, kv_bits / 8)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return ModelShape(
        name=name,
        hidden=fields.number("hidden_size"),
        vocabulary=fields.number("vocab_size"),
        max_context_tokens=fields.first("max_position_embeddings") or _DEFAULT_CONTEXT,
        layers=tuple(Counter(parts.layer(index, kind) for index, kind in enumerate(kinds)).items()),
        is_tied=str(text.get("model_type")).startswith(_TIED_BY_DEFAULT) if tied is None else bool(tied),
        kv_bits=kv_bits,
    )


class _Fields:
    """The fields of a configuration; `where`: its file, for errors."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def number(self, key: str) -> int:
        value = self.config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
            given = "it is missing" if value is None else f"given: {str(value)[:30]}"
            raise self.wrong(f"{key} must be a positive integer ({given}); is it a decoder's config.json?")
        return value

    def first(self, *keys: str) -> int:
        """The first of these numbers that is there; 0: none."""
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                if value > _MOST:
                    raise self.wrong(f"{key} is beyond all models (given: {str(value)[:30]})")
                return value
        return 0

    def list_of(self, key: str, size: int) -> list[Any] | None:
        """An entry of each layer; None: it is not there."""
        found = self.config.get(key)
        if isinstance(found, str):
            found = list(found)
        if not isinstance(found, list):
            return None
        if len(found) != size:
            raise self.wrong(f"{key} has {len(found)} entries for {size} layers")
        return found

    def wrong(self, text: str) -> UserError:
        return UserError(f"{self.where}: {text}")


_REFUSED = {
    *("bert", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "opt", "roberta"),
    "xlm-roberta",
}


def _refuse_others(fields: _Fields) -> None:
    """Refuse models that a shape cannot describe, because a wrong profile looks like a correct one."""
    kind = str(fields.config.get("model_type"))
    if kind in _REFUSED or fields.config.get("is_encoder_decoder"):
        raise fields.wrong(f"{kind} is no decoder with known matrices; no analytic model for it, measure a profile")
    if others := sorted(key for key in _UNKNOWN if fields.config.get(key)):
        raise fields.wrong(f"layers of an unknown kind ({', '.join(others)}); no model of them, measure a profile")


_FULL, _WINDOW, _LINEAR, _STATE, _MLP, _EXPERTS = "full", "window", "linear", "state", "mlp", "experts"
_KINDS = {
    "full_attention": _FULL,
    "attention": _FULL,
    "deepseek_sparse_attention": _FULL,
    "sliding_attention": _WINDOW,
    "chunked_attention": _WINDOW,
    "linear_attention": _LINEAR,
    "mamba": _STATE,
    "mlp": _MLP,
    "moe": _EXPERTS,
    "*": _FULL,
    "M": _STATE,
    "-": _MLP,
    "E": _EXPERTS,
    0: _FULL,
    1: _WINDOW,
}
"""By the entries of the lists of layers."""

_PARTS_ALONE = ("hybrid_override_pattern", "layers_block_type")
"""Lists of layers that each have attention, a state or an MLP, and not two of them."""


def _kinds(fields: _Fields) -> list[str]:
    """The kind of each layer."""
    listed = fields.config.get("layers_block_type")
    count = len(listed) if isinstance(listed, list) else fields.number("num_hidden_layers")
    if count > _MOST_LAYERS:
        raise fields.wrong(f"num_hidden_layers is beyond all models (given: {count})")
    for key in ("layer_types", *_PARTS_ALONE, "hybrid_layer_pattern"):
        if (entries := fields.list_of(key, count)) is not None:
            if others := sorted(
                {str(entry) for entry in entries if not isinstance(entry, str | int) or entry not in _KINDS}
            ):
                raise fields.wrong(f"layers of an unknown kind ({', '.join(others)}); measure a profile")
            return [_KINDS[entry] for entry in entries]
    if every := fields.first("full_attention_interval"):
        return [_LINEAR if (index + 1) % every else _FULL for index in range(count)]
    if not _window(fields) or fields.config.get("use_sliding_window") is False:
        return [_FULL] * count
    every, full = fields.first("sliding_window_pattern"), fields.first("max_window_layers")
    return [_FULL if index < full or (every and (index + 1) % every == 0) else _WINDOW for index in range(count)]


def _window(fields: _Fields) -> int:
    return fields.first("sliding_window", "attention_chunk_size")


class _Parts:
    """Makes the layers of a model."""

    def __init__(self, fields: _Fields, quantization: Quantization, value_bytes: float) -> None:
        self._fields = fields
        self._quantization = quantization
        self._value_bytes = value_bytes
        self._hidden = fields.number("hidden_size")
        self._experts = _experts(fields)
        self._matrices = fields.first("mlp_matrices") or 3

    def layer(self, index: int, kind: str) -> Layer:
        if kind in (_MLP, _EXPERTS):
            return self._mlp(index, kind == _EXPERTS)
        mixer = self._mixer(index, kind)
        if any(self._fields.config.get(key) for key in _PARTS_ALONE):
            return mixer
        mlp = self._mlp(index, self._has_experts(index))
        weights, divisors = (*mixer.weights, *mlp.weights), (*mixer.divisors, *mlp.divisors)
        return replace(mixer, weights=weights, experts=mlp.experts, reduces=2, divisors=divisors)

    def _mixer(self, index: int, kind: str) -> Layer:
        if kind == _LINEAR:
            return self._delta_net(index)
        if kind == _STATE:
            return self._state_space(index)
        return self._latent(index) if self._fields.first("kv_lora_rank") else self._attention(index, kind == _WINDOW)

    def _attention(self, index: int, has_window: bool) -> Layer:
        """Attention with as many or fewer KV heads."""
        fields, hidden = self._fields, self._hidden
        prefix, heads = ("swa_" if has_window else "global_"), fields.number("num_attention_heads")
        heads = fields.first(f"{prefix}num_attention_heads") or heads
        kv_heads = fields.first(f"{prefix}num_key_value_heads", f"num_{prefix}key_value_heads", "num_key_value_heads")
        dim = fields.first(f"{prefix}head_dim", "head_dim", "attention_head_dim") or hidden // heads
        if dim < 1:
            raise fields.wrong(f"num_attention_heads ({heads}) exceeds hidden_size ({hidden})")
        value_dim = fields.first(f"{prefix}v_head_dim", "v_head_dim") or dim
        kv_heads = kv_heads or heads
        has_gate = fields.config.get("attn_output_gate") or fields.config.get("model_type") == "qwen3_next"
        shares_values = not has_window and fields.config.get("attention_k_eq_v")
        matrices = {
            "q_proj": hidden * heads * dim * (2 if has_gate else 1),
            "k_proj": hidden * kv_heads * dim,
            "v_proj": 0 if shares_values else hidden * kv_heads * value_dim,
            "o_proj": heads * value_dim * hidden,
        }
        pair_flops = 2 * heads * (dim + value_dim)
        attention = Attention(
            kv_heads,
            kv_heads * (dim + value_dim) * self._value_bytes,
            pair_flops,
            pair_flops,
            window=_window(fields) if has_window else 0,
            frees=has_window and str(fields.config.get("model_type")).startswith(WINDOW_POOLS),
        )
        weights = self._weights(index, ("self_attn", "mixer"), matrices)
        return Layer(weights, attention=(attention,), reduces=1, divisors=(heads,))

    def _latent(self, index: int) -> Layer:
        """Latent attention (MLA): one latent part and one rotary part of a token serve all heads."""
        fields, hidden, heads = self._fields, self._hidden, self._fields.number("num_attention_heads")
        latent, rotary = fields.number("kv_lora_rank"), fields.number("qk_rope_head_dim")
        plain, value_dim = fields.number("qk_nope_head_dim"), fields.number("v_head_dim")
        query, query_dim = fields.first("q_lora_rank"), heads * (plain + rotary)
        matrices = {
            "q_a_proj": hidden * query,
            "q_b_proj": query * query_dim,
            "q_proj": 0 if query else hidden * query_dim,
            "kv_a_proj_with_mqa": hidden * (latent + rotary),
            "kv_b_proj": latent * heads * (plain + value_dim),
            "o_proj": heads * value_dim * hidden,
        }
        kv_bytes = (latent + rotary) * self._value_bytes
        step_flops = 2 * heads * (2 * latent + rotary)
        attention: tuple[Attention, ...] = (
            Attention(
                1,
                kv_bytes,
                2 * heads * (plain + rotary + value_dim),
                step_flops,
                2 * latent * heads * (plain + value_dim),
            ),
        )
        if chosen := fields.first("index_topk"):
            number, dim = fields.number("index_n_heads"), fields.number("index_head_dim")
            matrices |= {"indexer.wq_b": query * number * dim, "indexer.wk": hidden * (dim + number)}
            index_flops = 2 * number * dim
            attention = (
                Attention(1, kv_bytes, step_flops, step_flops, window=chosen),
                Attention(1, dim + 4, index_flops, index_flops),
            )
        return Layer(self._weights(index, ("self_attn",), matrices), attention=attention, reduces=1, divisors=(heads,))

    def _delta_net(self, index: int) -> Layer:
        """A gated delta net: a state of keys times values, and a convolution before it."""
        fields, hidden = self._fields, self._hidden
        key_heads, value_heads = fields.number("linear_num_key_heads"), fields.number("linear_num_value_heads")
        keys, values = (fields.number(f"linear_{part}_head_dim") for part in ("key", "value"))
        mixed = 2 * key_heads * keys + value_heads * values
        matrices = {
            "in_proj_qkv": hidden * mixed,
            "in_proj_z": hidden * value_heads * values,
            "in_proj_b": hidden * 2 * value_heads,
            "out_proj": value_heads * values * hidden,
        }
        return self._with_state(
            self._weights(index, ("linear_attn",), matrices, ("in_proj_qkvz",)),
            value_heads * keys * values,
            mixed * fields.number("linear_conv_kernel_dim"),
            (key_heads, value_heads),
        )

    def _state_space(self, index: int) -> Layer:
        """A state space model of the second generation (Mamba 2)."""
        fields = self._fields
        heads, size = fields.number("mamba_num_heads"), fields.number("ssm_state_size")
        inner, groups = heads * fields.number("mamba_head_dim"), fields.number("n_groups")
        mixed = inner + 2 * groups * size
        matrices = {"in_proj": self._hidden * (inner + mixed + heads), "out_proj": inner * self._hidden}
        return self._with_state(
            self._weights(index, ("mixer",), matrices), inner * size, mixed * fields.number("conv_kernel"), (heads,)
        )

    def _with_state(
        self, weights: tuple[Weights, ...], values: int, convolved: int, divisors: tuple[int, ...]
    ) -> Layer:
        stored = self._fields.config.get("mamba_ssm_dtype") or self._fields.config.get("mamba_ssm_cache_dtype")
        return Layer(
            weights,
            state_bytes=values * (2 if "16" in str(stored) else 4) + 2 * convolved,
            state_flops=_STATE_FLOPS * values,
            reduces=1,
            divisors=divisors,
        )

    def _has_experts(self, index: int) -> bool:
        fields = self._fields
        if self._experts is None or index < fields.first("first_k_dense_replace", "moe_layer_start_index"):
            return False
        frequency = fields.config.get("moe_layer_freq")
        if isinstance(frequency, list):
            return bool(frequency[index]) if index < len(frequency) else True
        listed = fields.config.get("mlp_only_layers")
        if isinstance(listed, list) and index in listed:
            return False
        step = fields.first("decoder_sparse_step", "interleave_moe_layer_step")
        return step == 0 or (index + 1) % step == 0

    def _mlp(self, index: int, has_experts: bool) -> Layer:
        fields, hidden = self._fields, self._hidden
        if not has_experts:
            width = fields.first("dense_intermediate_size", "intermediate_size_mlp") or fields.number(
                "intermediate_size"
            )
            return Layer(self._wide(index, ("mlp", "mixer"), hidden, width), reduces=1, divisors=self._blocks(width))
        if self._experts is None:
            raise fields.wrong("a layer of experts without their number")
        number, active = self._experts
        width = fields.first("moe_intermediate_size", "intermediate_size") or fields.number("moe_intermediate_size")
        latent = fields.first("moe_latent_size")
        every: tuple[Weights, ...] = (
            Weights(hidden * number + 2 * hidden * latent, BF16),
        )  # router, and around latent experts
        if shared := _shared_width(fields, width):
            every += self._wide(
                index, ("mlp.shared_expert", "mlp.shared_experts", "mixer.shared_experts"), hidden, shared
            )
        blocks: tuple[str, ...] = ("mlp.", "block_sparse_moe.", "mixer.")
        if fields.config.get("enable_moe_block"):
            every += self._wide(index, ("mlp",), hidden, fields.number("intermediate_size"))
            blocks = ("",)
        names = tuple(f"{block}experts.0" for block in blocks)
        experts = Experts(number, active, self._wide(index, names, latent or hidden, width))
        return Layer(every, experts, reduces=1, divisors=self._blocks(width))

    def _blocks(self, width: int) -> tuple[int, ...]:
        """The number of blocks of weights with a common scale, which a degree must divide."""
        block = self._quantization.block
        return (width // block,) if block and width % block == 0 else ()

    def _wide(self, index: int, blocks: tuple[str, ...], hidden: int, width: int) -> tuple[Weights, ...]:
        """An MLP, stored in one format."""
        return self._weights(index, blocks, {"up_proj": self._matrices * hidden * width}, ("gate_proj",))

    def _weights(
        self, index: int, blocks: tuple[str, ...], matrices: Mapping[str, int], others: tuple[str, ...] = ()
    ) -> tuple[Weights, ...]:
        """Matrices by format. `blocks`, `others`: further names under which checkpoints have them."""
        sizes: Counter[NumberFormat] = Counter()
        for name, parameters in matrices.items():
            names = (f"layers.{index}.{block}.{each}" for block in blocks for each in (name, *others))
            sizes[self._quantization.format_of(*names)] += parameters
        return tuple(Weights(parameters, each) for each, parameters in sizes.items())


_STATE_FLOPS = 8
"""Of a token per value of a state: decay, change and reading, with what their computation in chunks adds."""


def _experts(fields: _Fields) -> tuple[int, int] | None:
    """Experts of a layer, and the number of them per token; None: no layer has any."""
    experts = fields.first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if experts <= 1:
        return None
    keys = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_k")
    active = fields.first(*keys) or None
    if active is None or active > experts:
        raise fields.wrong(f"num_experts_per_tok must be from 1 to {experts} (given: {active})")
    return experts, active


def _shared_width(fields: _Fields, width: int) -> int:
    """Width of the MLP that works on every token beside the experts; 0: none."""
    if given := fields.first(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim"
    ):
        return given
    if fields.config.get("model_type") == "llama4_text":
        return width
    return width * fields.first("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
