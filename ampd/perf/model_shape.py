"""The dimensions of a decoder model, from which its weights, KV and arithmetic follow, and how they are read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampd.errors import UserError

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
