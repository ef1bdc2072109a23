"""Settings of `ampd top`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ampd.graph_settings import GraphSettings
from ampd.perf.presets import profile_names
from ampd.settings import Settings


class TopSettings(Settings):
    """Watch a running graph: workers, queues, latencies against the SLO, routes, sessions. q or Ctrl-C ends it."""

    known_names: ClassVar = {"perf": profile_names}

    namespace: str | None = Field(
        None,
        validation_alias="dyn_namespace",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Dynamo namespace of the graph; default: that of the `ampd serve` found here, else `ampd`.",
    )
    state_url: str | None = Field(
        None,
        description="The graph's shared state; default: that of the "
        f"`ampd serve` found here, else {GraphSettings.model_fields['state_url'].default}.",
    )
    interval_s: float = Field(1.0, ge=0.1, description="Seconds between two reads.")
    once: bool = Field(False, description="Read once, print and end.")
    as_json: bool = Field(
        False,
        validation_alias="json",
        description="Print JSON on stdout: one object with --once, else one line per read.",
    )
    perf: str | None = Field(
        None,
        description="Performance model, to predict the waiting time of each queue; default: that of the "
        "`ampd serve` found here, else none.",
    )
