"""The case of a simulation or a plan: model, GPU, sessions and targets."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

from pydantic import Field
from pydantic_settings import CliPositionalArg

from ampd.errors import UserError
from ampd.page_keys import PAGE_TOKENS
from ampd.perf.gpus import GPUS
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import MODELS, NAMES, analytic_model, load_performance_model, profile_names
from ampd.policies import registry
from ampd.settings import Settings
from ampd.types import GIB, Parallelism, Slo
from planner.simulator.cluster import ReplicaGroup, parse_groups
from workloads.trace import shipped_traces


class PerfSource(StrEnum):
    """Where the performance model of `--model` on `--gpu` comes from."""

    ANALYTIC = "analytic"
    AICONFIGURATOR = "aiconfigurator"


class CaseSettings(Settings):
    """A workload on a kind of hardware."""

    known_names: ClassVar = {**registry.NAMES, "perf": profile_names, "trace": shipped_traces}

    trace: CliPositionalArg[str] = Field(description="Trace file, or the name of a shipped trace.")
    model: str | None = Field(
        None,
        description=f"Model preset ({', '.join(MODELS)}), or the path of a Hugging Face config.json or of its folder.",
    )
    gpu: str | None = Field(None, description=f"GPU preset: {', '.join(GPUS)}.")
    perf_source: PerfSource = Field(
        PerfSource.ANALYTIC, description="Where the times of --model on --gpu come from (aiconfigurator: its package)."
    )
    perf: str | None = Field(None, description=f"Performance model instead of --model and --gpu: {NAMES}.")
    kv_capacity_tokens: int | None = Field(
        None, ge=1, description="KV memory of every replica in tokens; default: the performance model's."
    )
    kv_store_gib_per_gpu: float = Field(
        0.0,
        ge=0,
        description="Host memory of the KV stores in GiB per GPU; 0: no stores.",
    )
    limit: int | None = Field(None, ge=1, description="Sessions; with --rate the trace is repeated as needed.")
    ttft: float = Field(2.0, gt=0, description="TTFT target in seconds.")
    itl: float = Field(0.1, gt=0, description="ITL target in seconds.")
    seed: int = Field(0, description="Seed of arrivals and of the policies' random choices.")
    as_json: bool = Field(False, validation_alias="json", description="Print one JSON object on stdout.")

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft, self.itl)

    def performance_model(self) -> PiecewiseModel:
        """The performance model that the flags name.

        Raises:
            UserError: an unknown preset (the known ones are listed), a wrong file, or flags that exclude each other.
        """
        if self.perf is not None:
            if self.model is not None or self.gpu is not None:
                raise UserError("--perf: a profile has its own model and GPU; leave out --model and --gpu")
            return load_performance_model(self.perf)
        if self.model is None or self.gpu is None:
            raise UserError("--model and --gpu are missing (or give --perf, a profile of `ampd profile`)")
        if self.perf_source is PerfSource.AICONFIGURATOR:
            from ampd.perf.aiconfigurator import aiconfigurator_model

            return aiconfigurator_model(self.model, self.gpu)
        return analytic_model(self.model, self.gpu)

    def kv_capacity_of(self, model: PiecewiseModel, parallelism: Parallelism) -> int:
        """KV memory of a replica in tokens; 0: unlimited, because it is unknown."""
        return self.kv_capacity_tokens or model.kv_capacity_tokens(parallelism) or 0

    def kv_store_of(self, model: PiecewiseModel, parallelism: Parallelism) -> int:
        """Host memory of a replica's KV store in tokens; 0: it has none.

        Raises:
            UserError: the performance model does not know the size of a token's KV.
        """
        if not self.kv_store_gib_per_gpu:
            return 0
        token_bytes = model.profile.kv_bytes_per_token
        if token_bytes is None:
            raise UserError(f"--kv-store-gib-per-gpu: {model.name} has no kv_bytes_per_token; add it to the file")
        tokens = int(self.kv_store_gib_per_gpu * parallelism.tp * GIB) // token_bytes
        if tokens < PAGE_TOKENS:
            given = f"{self.kv_store_gib_per_gpu:g} GiB"
            raise UserError(f"--kv-store-gib-per-gpu: {given} hold no page of {PAGE_TOKENS} tokens; give more")
        return tokens

    def group(self, text: str, flag: str, model: PiecewiseModel) -> tuple[ReplicaGroup, ...]:
        """The replicas that a flag names, with their KV memory.

        Raises:
            UserError: the text does not fit, or the model has no times for the parallelism.
        """
        groups = parse_groups(text, flag)
        model.require([theta for _, theta in groups], ())
        return tuple(
            ReplicaGroup(count, theta, self.kv_capacity_of(model, theta), self.kv_store_of(model, theta))
            for count, theta in groups
        )


def provenance_of(model: PiecewiseModel) -> dict[str, Any]:
    source = model.provenance
    return {"name": model.name, "kind": source.kind, "model": source.model, "gpu": source.gpu}
