"""The case of a simulation or a plan: model, GPU, sessions, targets, modes and policies; the settings of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from pydantic_settings import CliPositionalArg

from ampd.errors import UserError
from ampd.keys import PAGE_TOKENS
from ampd.perf.gpus import GPUS
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import MODELS, NAMES, analytic_model, load_performance_model, profile_names
from ampd.policies import defaults, registry
from ampd.policies.base import parse_named
from ampd.policies.ordering.fcfs import Fcfs
from ampd.policies.pools.static import StaticPools
from ampd.policies.routing.always_local import AlwaysLocal
from ampd.policies.routing.always_remote import AlwaysRemote
from ampd.policies.slicing.whole import WholeSlicing
from ampd.settings import Settings
from ampd.types import ATTAINMENT, GIB, Parallelism, Slo
from planner.layout.trial import BUDGET_S
from planner.simulator.options import ReplicaGroup, parse_groups
from workloads.trace import Session, shipped_traces


class Mode(StrEnum):
    """How the replicas are used. All modes but `disaggregated` are whole systems with policies of their own.

    `colocated` takes an ordering and a slicing where they are named. `always-remote` fixes its own.
    """

    DISAGGREGATED = "disaggregated"
    ALWAYS_REMOTE = "always-remote"
    COLOCATED = "colocated"

    @property
    def named_kinds(self) -> frozenset[str]:
        """The kinds of policies that the call may name. The mode fixes all others but the binding."""
        return _NAMED_KINDS[self]


_NAMED_KINDS = {
    Mode.DISAGGREGATED: frozenset({"routing", "ordering", "slicing", "pools"}),
    Mode.ALWAYS_REMOTE: frozenset[str](),
    Mode.COLOCATED: frozenset({"ordering", "slicing"}),
}

_SYSTEMS = {
    Mode.ALWAYS_REMOTE: (AlwaysRemote.policy_name, Fcfs.policy_name),
    Mode.COLOCATED: (AlwaysLocal.policy_name, Fcfs.policy_name),
}
"""Routing and ordering of the modes that are whole systems. They run prefills whole, in the roles of the start."""


@dataclass(frozen=True, slots=True)
class Combination:
    """One simulation of a call, with the policies that it runs."""

    mode: Mode
    routing: str
    ordering: str
    rate: float | None
    slicing: str = defaults.SLICING
    pools: str = defaults.POOLS

    @classmethod
    def of(
        cls, mode: Mode, routing: str, ordering: str | None, slicing: str | None, pools: str, rate: float | None
    ) -> Combination:
        """The combination of a mode with the named policies, or with its own where the mode fixes them.

        Args:
            ordering, slicing: None: not named. The mode then has its own.
        """
        if mode is Mode.DISAGGREGATED:
            return cls(mode, routing, ordering or defaults.ORDERING, rate, slicing or defaults.SLICING, pools)
        own_routing, own_ordering = _SYSTEMS[mode]
        ordering = (ordering if "ordering" in mode.named_kinds else None) or own_ordering
        slicing = (slicing if "slicing" in mode.named_kinds else None) or WholeSlicing.policy_name
        return cls(mode, own_routing, ordering, rate, slicing, StaticPools.policy_name)

    @property
    def label(self) -> str:
        """A name for tables and plots, without the rate."""
        parts = [self.routing, self.ordering]
        if self.mode is not Mode.DISAGGREGATED:
            parts = [str(self.mode), *([] if self.ordering == _SYSTEMS[self.mode][1] else [self.ordering])]
        return " / ".join([*parts, *(f"{kind} {name}" for kind, name in self.named.items())])

    @property
    def named(self) -> dict[str, str]:
        """The slicing and the pools policy, where they are not those that the mode has by itself."""
        is_split = self.mode is Mode.DISAGGREGATED
        own = {
            "slicing": defaults.SLICING if is_split else WholeSlicing.policy_name,
            "pools": defaults.POOLS if is_split else StaticPools.policy_name,
        }
        given = {"slicing": self.slicing, "pools": self.pools}
        return {kind: name for kind, name in given.items() if name != own[kind]}


def papers_note(combinations: Sequence[Combination]) -> str:
    """A sentence that tells the policy `ampd` from this system; empty if no combination has that policy."""
    named = {parse_named(text)[0] for each in combinations for text in (each.routing, each.ordering)}
    if "ampd" not in named:
        return ""
    return "The policy `ampd` is Algorithm 1 of the AMPD paper, and not this system with its default policies."


# -- The case of a simulation or a plan: model, GPU, sessions and targets


class PerfSource(StrEnum):
    """Where the performance model of `--model` on `--gpu` comes from."""

    ANALYTIC = "analytic"
    AICONFIGURATOR = "aiconfigurator"


class KvFormat(StrEnum):
    """How KV is stored, as SGLang's `kv_cache_dtype` names it."""

    AUTO = "auto"
    BF16 = "bf16"
    FP8 = "fp8_e4m3"

    @property
    def bits(self) -> int:
        """Of a value; 0: the model's configuration says it."""
        return {KvFormat.AUTO: 0, KvFormat.BF16: 16, KvFormat.FP8: 8}[self]


STORE_GIB_PER_GPU = 64.0
"""Host memory for the KV of sessions: about the KV memory of a GPU of 141 GB with a 32B model."""


class CaseSettings(Settings):
    """A workload on a kind of hardware."""

    known_names: ClassVar = {**registry.NAMES, "perf": profile_names, "trace": shipped_traces}
    topics: ClassVar = {"model": "model, GPU and memory", "limit": "load and targets", "as_json": "output"}

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
    context: int | None = Field(
        None, ge=2, description="Longest context in tokens; default: what the model's config.json or --perf says."
    )
    kv_cache_dtype: KvFormat = Field(
        KvFormat.AUTO, description="Format of the KV of --model; auto: as its config.json says, else 16 bits."
    )
    kv_capacity_tokens: int | None = Field(
        None, ge=1, description="KV memory of every replica in tokens; default: the performance model's."
    )
    kv_store_gib_per_gpu: float = Field(
        STORE_GIB_PER_GPU,
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
        model = self._performance_model()
        if self.context is None:
            return model
        return PiecewiseModel(model.profile.model_copy(update={"max_context_tokens": self.context}), model.name)

    def _performance_model(self) -> PiecewiseModel:
        bits = self.kv_cache_dtype.bits
        if self.perf is not None:
            if self.model is not None or self.gpu is not None or bits:
                raise UserError(
                    "--perf: a profile has its own model, GPU and KV; leave out --model, --gpu and --kv-cache-dtype"
                )
            return load_performance_model(self.perf)
        if self.model is None or self.gpu is None:
            raise UserError("--model and --gpu are missing (or give --perf, a profile of `ampd profile`)")
        if self.perf_source is PerfSource.AICONFIGURATOR:
            from ampd.perf.fit import aiconfigurator_model

            return aiconfigurator_model(self.model, self.gpu, kv_bits=bits)
        return analytic_model(self.model, self.gpu, kv_bits=bits)

    def kv_capacity_of(self, model: PiecewiseModel, parallelism: Parallelism) -> int:
        """KV memory of a replica in tokens; 0: unlimited, because it is unknown."""
        return self.kv_capacity_tokens or model.kv_capacity_tokens(parallelism) or 0

    def kv_store_of(self, model: PiecewiseModel, parallelism: Parallelism) -> int:
        """Host memory of a replica's KV store in tokens; 0: it has none.

        Raises:
            UserError: a size is given, and the performance model does not know the size of a token's KV.
        """
        token_bytes = model.profile.kv_bytes_per_token
        is_given = "kv_store_gib_per_gpu" in self.model_fields_set
        if not self.kv_store_gib_per_gpu or (token_bytes is None and not is_given):
            return 0
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


@dataclass(frozen=True, slots=True)
class Limit:
    """A number of tokens that a context may have. `what`: the beginning of a clause that ends in the number."""

    tokens: int
    what: str

    @classmethod
    def of(cls, max_context_tokens: int, kv_tokens: int) -> Limit | None:
        """The tighter of a model's and of a replica's limit; 0: it has none. None: neither has one."""
        limits = [
            cls(max_context_tokens, "the longest context of the model is"),
            cls(kv_tokens, "the KV memory of a replica holds"),
        ]
        return min((limit for limit in limits if limit.tokens), key=lambda limit: limit.tokens, default=None)


def misfits(sessions: Sequence[Session], limit: Limit | None) -> str | None:
    """A clause about the sessions whose contexts exceed a limit, with the number and the limit; None: all fit."""
    longest = [size for session in sessions if limit and (size := session.max_context_tokens) > limit.tokens]
    if limit is None or not longest:
        return None
    return (
        f"{len(longest)} of the trace's {len(sessions)} sessions do not fit: the longest has {max(longest)} tokens, "
        f"{limit.what} {limit.tokens}"
    )


def provenance_of(model: PiecewiseModel) -> dict[str, Any]:
    source = model.provenance
    return {"name": model.name, "kind": source.kind, "model": source.model, "gpu": source.gpu}


# -- Settings of `ampd plan`


class PlanSettings(CaseSettings):
    """Find how many prefill and decode replicas, at which tensor parallelism, serve a workload best."""

    topics: ClassVar = {
        "gpus": "search",
        "routing": "policies",
        "jobs": "processes and results",
        "output_manifest": "Kubernetes",
    }

    gpus: int = Field(ge=1, le=1_000_000, description="GPUs of the cluster.")
    rate: float | None = Field(None, gt=0, description="Session arrivals per second; default: the trace's own rate.")
    use_all: bool = Field(
        False,
        description="Find the layout that carries most on all --gpus, not the fewest GPUs for --rate.",
    )
    attainment: float = Field(
        ATTAINMENT, gt=0, le=1, description="Share of rounds within both targets that carries a rate."
    )
    fail_under: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Exit code 1 if a smaller share of the rounds is within both targets.",
    )
    budget_s: float = Field(
        BUDGET_S,
        ge=0,
        description="Longest time of the search in seconds; 0: the layout that the integer programme "
        "proposes. Ctrl-C keeps the best so far.",
    )
    degrees: str = Field("1,2,4,8", description="Tensor-parallel degrees to choose from, comma-separated.")
    top: int = Field(3, ge=1, le=50, description="Layouts to show, best first.")
    routing: str = Field(defaults.ROUTING, description="Routing policy of the simulations.")
    ordering: str = Field(defaults.ORDERING, description="Order of the prefill queues.")
    slicing: str = Field(defaults.SLICING, description="What an engine computes next.")
    pools: str = Field(defaults.POOLS, description="When replicas change their roles; static: never.")
    jobs: int | None = Field(None, ge=1, description="Number of processes; default: one per core.")
    gpu_price: float | None = Field(
        None, gt=0, description="Price of a GPU for an hour, in any currency: layouts get prices."
    )
    report: Path | None = Field(None, description="Write an HTML report to this file.")
    output_manifest: Path | None = Field(
        None, description="Write the best layout for Kubernetes: one file if it ends in .yaml, else a kustomize folder."
    )
    force: bool = Field(False, description="Write the manifest of a layout that misses the rate, too.")
    manifest_model_path: str | None = Field(
        None, description="Folder of the model in the containers, on the volume at /models; default: /models/NAME."
    )
