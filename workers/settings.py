"""Settings of a worker process: what every worker takes, and the settings of the engine that was chosen."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from ampd.handler_stream import MOST_JOINED_TOKENS
from ampd.perf.presets import profile_names
from ampd.policies import defaults, registry
from ampd.settings import GraphSettings

PROG = "python -m workers"


class WorkerSettings(GraphSettings):
    """One AMPD worker: a Dynamo component that prefills and decodes rounds of agent sessions on one engine replica."""

    known_names: ClassVar = {**registry.NAMES, "perf": profile_names}
    role: Literal["prefill", "decode", "mixed"] = Field(
        description="Work of this worker: prefills for other workers, sessions of its own, or both."
    )
    engine: Literal["sglang", "modelled"] = Field(
        "sglang",
        description="Engine: real SGLang, or modelled (sleeps by the performance model).",
    )
    model: Path = Field(description="Model folder (Hugging Face layout, with its tokenizer).")
    tp: int = Field(1, ge=1, description="Tensor-parallel degree: GPUs of this worker.")
    ordering: str = Field(defaults.ORDERING, description="Policy that orders the prefill queue.")
    slicing: str = Field(defaults.SLICING, description="Policy that says what the engine computes next.")
    stream_tokens: int = Field(
        1,
        ge=1,
        le=MOST_JOINED_TOKENS,
        description="Tokens of a round that are sent together, after its first one. None waits longer than "
        "as many ITL targets, or than 1 s.",
    )
    kv_timeout_s: float = Field(
        5.0,
        gt=0,
        description="Longest time for one read of KV from another worker; the missing part is recomputed.",
    )
    grace_s: float = Field(0.5, ge=0, description="After SIGTERM: seconds in which late calls are still taken.")
    drain_s: float = Field(25.0, ge=0, le=30, description="After SIGTERM: seconds that rounds in progress may take.")


def chosen_engine(argv: Sequence[str]) -> str:
    """The engine that `argv` (or the environment) names, before everything else is parsed.

    The settings of an engine are part of its own module, so its name must be known to know which flags there are.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--engine", nargs="?")
    known, _ = parser.parse_known_args(list(argv))
    return str(known.engine or os.environ.get("AMPD_ENGINE") or "sglang")
