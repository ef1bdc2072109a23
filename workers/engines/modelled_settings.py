"""Settings of the modelled engine."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ampd.page_keys import PAGE_TOKENS
from ampd.settings import Settings

_STORE_SHARE = 4


class ModelledSettings(Settings):
    """What the modelled engine simulates."""

    time_scale: float = Field(
        1.0, gt=0, description="Factor on all modelled times: 0.1 makes prefills, steps and KV reads ten times faster."
    )
    kv_capacity_tokens: int = Field(
        262_144, ge=1, description="KV memory of the device, in tokens: for running rounds, and as a cache."
    )
    kv_store_tokens: int | None = Field(
        None,
        ge=1,
        description="KV store, in tokens: host memory for the KV of sessions; default: four times the device's.",
    )
    max_context_tokens: int | None = Field(
        None, ge=2, description="Longest context; default: what the model's config.json says."
    )
    page_size: int = Field(PAGE_TOKENS, ge=1, description="Tokens per KV page.")
    eos_every_tokens: int = Field(
        128,
        ge=0,
        description="Mean number of output tokens after which a round without `ignore_eos` ends by itself; 0: never.",
    )
    replies: Path | None = Field(
        None,
        description="Scripted replies (JSON lines, one reply per turn), to rehearse an agent; default: made-up words.",
    )

    @property
    def store_tokens(self) -> int:
        """Size of the store. Servers have a few times as much host memory as their GPUs have for KV."""
        return _STORE_SHARE * self.kv_capacity_tokens if self.kv_store_tokens is None else self.kv_store_tokens
