"""Settings of the modelled engine."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ampd.page_keys import PAGE_TOKENS
from ampd.settings import OldFlag, Settings


class ModelledSettings(Settings):
    """What the modelled engine simulates."""

    old_flags: ClassVar = {
        "--kv-bytes-per-token": OldFlag("the model's config.json gives it; leave it out"),
    }

    time_scale: float = Field(
        1.0,
        gt=0,
        description="Factor on all modelled times: 0.1 makes prefills, steps and KV reads ten times faster.",
    )
    kv_capacity_tokens: int = Field(262_144, ge=1, description="KV memory of the engine, in tokens.")
    max_context_tokens: int | None = Field(
        None, ge=2, description="Longest context; default: what the model's config.json says."
    )
    page_size: int = Field(PAGE_TOKENS, ge=1, description="Tokens per KV page.")
    eos_every_tokens: int = Field(
        0, ge=0, description="Mean number of output tokens after which a round ends by itself (EOS); 0: never."
    )
