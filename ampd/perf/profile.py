"""The file of a performance model: a readable JSON document whose keys carry their units.

All curves are sums of costs that cannot be negative, so predicted times never fall when the amount of work grows. They
are continuous apart from the steps that a segment's own `alpha_s` adds at its start. `ampd.perf.piecewise` evaluates
them.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ampd.documents import read_document, write_document

_WHAT = "performance model"
_MOST = 1 << 53
"""Larger numbers are nonsense, and floats cannot hold them."""

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Piece = tuple[int, float, float]
"""(start, alpha, slope) of a segment, in seconds."""
TensorParallel = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Provenance(_Part):
    """The origin and the accuracy of the figures."""

    kind: Literal["measured", "analytic", "rough"] = Field(
        description="`measured` by a profiler, `analytic` from published figures, `rough` from a few observations."
    )
    source: str = Field(min_length=1, description="Person or program that produced the figures.")
    model: str = Field(min_length=1, description="The language model.")
    gpu: str = Field(min_length=1, description="The accelerator (or CPU) of the workers.")
    date: datetime.date = Field(description="When the figures were produced.")
    method: str = Field(min_length=1, description="How they were measured or derived.")
    assumptions: dict[str, float | str] = Field(
        default_factory=dict, description="Figures that the method assumes, with units in their names."
    )
    fit_error: dict[str, float] = Field(
        default_factory=dict,
        description="Mean relative error of a fit on points that it has not seen, by curve; empty: none was measured.",
    )


class PrefillSegment(_Part):
    """Costs of the new tokens from `from_incr_tokens` up to the next segment."""

    from_incr_tokens: int = Field(ge=0, description="First length of an increment that enters this segment.")
    alpha_s: Seconds = Field(description="Added once when the increment enters the segment.")
    beta_s_per_token: Seconds = Field(description="Cost of a token.")
    gamma_s_per_token2: Seconds = Field(description="Cost of a token's attention to one token before it.")


class PrefillCurve(_Part):
    """Prefill time over history and increment."""

    history_s_per_token: Seconds = Field(0.0, description="Cost of reading one token of history, once per prefill.")
    history_s_per_token2: Seconds = Field(
        default=0.0,
        description="Cost of a pair of history tokens, for engines whose attention goes over the history again "
        "(PyTorch's on CPUs).",
    )
    segments: tuple[PrefillSegment, ...] = Field(min_length=1)

    _starts = field_validator("segments")(lambda segments: _check_starts(segments, "from_incr_tokens"))


class DecodeSegment(_Part):
    """Costs of the sequences from `from_batch` up to the next segment."""

    from_batch: int = Field(ge=0, description="First batch size that enters this segment.")
    alpha_s: Seconds = Field(description="Added once when the batch enters the segment.")
    beta_s_per_sequence: Seconds = Field(description="Cost of a sequence.")


class DecodeCurve(_Part):
    """Time of one decode step over batch size and total context."""

    context_s_per_token: Seconds = Field(description="Cost of one token of context, summed over the batch.")
    segments: tuple[DecodeSegment, ...] = Field(min_length=1)

    _starts = field_validator("segments")(lambda segments: _check_starts(segments, "from_batch"))

    @classmethod
    def of(cls, context_s: float, pieces: Iterable[Piece]) -> DecodeCurve:
        """The curve over batch sizes with these pieces."""
        segments = (DecodeSegment(from_batch=n, alpha_s=alpha, beta_s_per_sequence=beta) for n, alpha, beta in pieces)
        return cls(context_s_per_token=context_s, segments=tuple(segments))


class MixedPassCosts(_Part):
    """What a pass gains that prefills and is a step of the decode batch too."""

    saved: float = Field(
        le=1,
        ge=0,
        description="Share that is saved of the time that reading the weights once, instead of twice, could save.",
    )
    context_s_per_token: Seconds = Field(
        0.0, description="Cost of a token of the batch's context beyond that in a step of its own."
    )


class TransferSegment(_Part):
    """Costs of the tokens from `from_tokens` up to the next segment."""

    from_tokens: int = Field(ge=0, description="First length that enters this segment.")
    alpha_s: Seconds = Field(description="Added once when the transfer enters the segment.")
    beta_s_per_token: Seconds = Field(description="Cost of a token's KV.")


class TransferCurve(_Part):
    """Time to move KV from a worker of one parallelism to one of another."""

    tp_source: TensorParallel
    tp_target: TensorParallel
    segments: tuple[TransferSegment, ...] = Field(min_length=1)

    _starts = field_validator("segments")(lambda segments: _check_starts(segments, "from_tokens"))

    @classmethod
    def of(cls, tp_source: int, tp_target: int, pieces: Iterable[Piece]) -> TransferCurve:
        """The curve over tokens with these pieces."""
        segments = (TransferSegment(from_tokens=n, alpha_s=alpha, beta_s_per_token=beta) for n, alpha, beta in pieces)
        return cls(tp_source=tp_source, tp_target=tp_target, segments=tuple(segments))


class ParallelismCurves(_Part):
    """Compute times of one worker replica of a tensor-parallel degree."""

    tp: TensorParallel
    prefill: PrefillCurve
    decode: DecodeCurve
    mixed_passes: dict[str, MixedPassCosts] = Field(
        default_factory=dict,
        description="Mixed passes by attention backend, `calculated` if they were not measured. Simulations take the "
        "first. With any other backend mixed passes save nothing.",
    )
    kv_capacity_tokens: int | None = Field(
        default=None,
        ge=0,
        le=_MOST,
        description="KV memory of one replica beside the weights, in tokens; null: unknown.",
    )
    kv_shards: TensorParallel | None = Field(
        default=None,
        description="GPUs that split a replica's KV. With more GPUs than KV heads, several hold the same. Null: all.",
    )


class PerformanceProfile(_Part):
    """The content of a performance-model file."""

    format: Literal["ampd-performance-model/1"] = "ampd-performance-model/1"
    provenance: Provenance
    workers: tuple[ParallelismCurves, ...] = Field(min_length=1)
    kv_transfers: tuple[TransferCurve, ...] = ()
    kv_bytes_per_token: int | None = Field(
        default=None, ge=1, le=_MOST, description="KV of one token over all layers; null: unknown."
    )
    host_link_bytes_per_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="From host memory to one GPU, as reached; null: 80 % of the peak of the GPU's PCIe generation.",
    )
    max_context_tokens: int | None = Field(default=None, ge=1, le=_MOST, description="Longest context of the model.")

    @model_validator(mode="after")
    def _unique(self) -> PerformanceProfile:
        degrees = [curves.tp for curves in self.workers]
        pairs = [(curve.tp_source, curve.tp_target) for curve in self.kv_transfers]
        if len(set(degrees)) < len(degrees):
            raise ValueError(f"workers: a tp occurs twice in {degrees}")
        if len(set(pairs)) < len(pairs):
            raise ValueError(f"kv_transfers: a pair (tp_source, tp_target) occurs twice in {pairs}")
        return self


Segments = TypeVar("Segments", bound=tuple[BaseModel, ...])


def _check_starts(segments: Segments, key: str) -> Segments:
    starts = [getattr(segment, key) for segment in segments]
    if starts[0] != 0:
        raise ValueError(f"the first segment must have {key} 0, not {starts[0]}")
    if any(later <= earlier for earlier, later in pairwise(starts)):
        raise ValueError(f"{key} must grow from segment to segment: {starts}")
    return segments


def read_profile(path: Path) -> PerformanceProfile:
    """Read and check a file.

    Raises:
        UserError: the file cannot be read or a field is wrong, as one line with the file and the field.
    """
    return read_document(PerformanceProfile, path, _WHAT)


def write_profile(profile: PerformanceProfile, path: Path) -> None:
    """Write a file that `read_profile` reads back equal; an existing file is replaced only as a whole.

    Raises:
        UserError: the file cannot be written.
    """
    write_document(profile.model_dump_json(indent=2) + "\n", path, _WHAT)
