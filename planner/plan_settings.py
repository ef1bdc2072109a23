"""Settings of `ampd plan`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ampd.policies import defaults
from ampd.types import ATTAINMENT
from planner.case_settings import CaseSettings
from planner.layout.trial import BUDGET_S


class PlanSettings(CaseSettings):
    """Find how many prefill and decode replicas, at which tensor parallelism, serve a workload best."""

    gpus: int = Field(ge=1, le=1_000_000, description="GPUs of the cluster.")
    rate: float | None = Field(None, gt=0, description="Session arrivals per second; default: the trace's own rate.")
    use_all: bool = Field(
        False,
        description="Find the layout that carries most on all --gpus, not the fewest GPUs for --rate.",
    )
    attainment: float = Field(
        ATTAINMENT, gt=0, le=1, description="Share of rounds within both targets that carries a rate."
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
    jobs: int | None = Field(None, ge=1, description="Number of processes; default: one per core.")
    gpu_price: float | None = Field(
        None, gt=0, description="Price of a GPU for an hour, in any currency: layouts get prices."
    )
    report: Path | None = Field(None, description="Write an HTML report to this file.")
    output_manifest: Path | None = Field(
        None, description="Write the best layout for Kubernetes: one file if it ends in .yaml, else a kustomize folder."
    )
    manifest_layout: int = Field(1, ge=1, description="Layout to write: 1 is the best.")
    manifest_model_path: str | None = Field(
        None, description="Folder of the model in the containers, on the volume at /models; default: /models/NAME."
    )
    manifest_image: str | None = Field(
        None, min_length=1, description="Image of the containers; default: the one that the manifests name."
    )
