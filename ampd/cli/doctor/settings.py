"""Settings of `ampd doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from ampd.cli.serve.settings import EMBEDDED, TINY, EngineName
from ampd.graph_settings import GraphSettings
from ampd.perf.presets import NAMES, profile_names
from ampd.settings import Settings


class DoctorSettings(Settings):
    """Report whether this machine can run a graph, and how well: ok, slow or wrong, with a fix for each check."""

    known_names: ClassVar = {"perf": profile_names}

    engine: EngineName = Field(EngineName.SGLANG, description="Engine of the two workers that are tried.")
    model: str = Field(TINY, description="Model folder (Hugging Face layout), or `tiny`.")
    tp: int = Field(1, ge=1, description="GPUs per worker (tensor parallelism).")
    perf: str | None = Field(
        None,
        description=f"Performance model that the short profile is compared with: {NAMES}; default: as `ampd serve` "
        "takes it.",
    )
    namespace: str = Field(
        GraphSettings.model_fields["namespace"].default,
        validation_alias="dyn_namespace",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Dynamo namespace of the graph: the keys that are written to the shared state to try it begin "
        "with it.",
    )
    state_url: str = Field(
        EMBEDDED,
        description="Shared state to check: redis://, rediss:// or unix://; `embedded` checks the Redis that `ampd "
        "serve` would start. The two workers always use an embedded one.",
    )
    engines: bool = Field(True, description="Start two engines and compare, measure and profile them.")
    worker_args: str = Field("", description="Further flags for both workers, as one string.")
    start_timeout_s: float = Field(300.0, gt=0, description="Seconds that the two engines may take to become ready.")
    as_json: bool = Field(False, validation_alias="json", description="Print one JSON object on stdout.")
    out: Path | None = Field(
        None,
        description="Write the report to this file, too, with what was read and the ends of the logs; -: print it on "
        "stdout instead of the table.",
    )
