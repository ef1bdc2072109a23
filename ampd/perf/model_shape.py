"""Weights, KV and arithmetic of a decoder model, from its dimensions."""

from __future__ import annotations

from dataclasses import dataclass


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
