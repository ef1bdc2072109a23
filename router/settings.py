"""Settings of a coordinator process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field

from ampd.errors import UserError
from ampd.graph_settings import GraphSettings
from ampd.policies import defaults

PROG = "python -m router"


class CoordinatorSettings(GraphSettings):
    """One AMPD coordinator: registers the model at the Dynamo frontend, binds sessions, routes every prefill."""

    model: Path = Field(description="Model folder (Hugging Face layout): tokenizer, chat template, config.")
    model_name: str | None = Field(None, description="Name that clients use; default: the model folder's name.")
    routing: str = Field(defaults.ROUTING, description="Policy that chooses where a round is prefilled.")
    routing_params: str = Field("", description="Its parameters, as in `alpha=0.9,beta=0.85`.")
    binding: str = Field(defaults.BINDING, description="Policy that binds a new session to a decode worker.")
    binding_params: str = Field("", description="Its parameters.")
    pools: str = Field(defaults.POOLS, description="Policy that changes the workers' roles; static: none changes.")
    pools_interval_s: float = Field(0.5, gt=0, description="Seconds between two questions to the pools policy.")
    kv_block_size: int = Field(16, ge=1, description="Tokens per KV page of the workers' engines.")
    context_length: int | None = Field(
        None, ge=2, description="Longest prompt and output together; default: what the model's config.json says."
    )
    dyn_tool_call_parser: str | None = Field(
        None, validation_alias="dyn_tool_call_parser", description="Tool-call parser of the model (as in Dynamo)."
    )
    dyn_reasoning_parser: str | None = Field(
        None, validation_alias="dyn_reasoning_parser", description="Reasoning parser of the model (as in Dynamo)."
    )
    custom_jinja_template: Path | None = Field(
        None,
        validation_alias=AliasChoices("custom_jinja_template", "dyn_custom_jinja_template"),
        description="Chat template file that replaces the model's own (as in Dynamo).",
    )
    context_memory_mib: int = Field(
        256, ge=1, description="Memory for the last contexts of sessions, by which rewritten prompts are noticed."
    )
    retries: int = Field(3, ge=0, description="Lost workers that one round survives before the client gets a 503.")
    suspect_s: float = Field(
        5.0, gt=0, description="Seconds that a worker is left alone after a failed call, unless it publishes again."
    )
    call_timeout_s: float = Field(2.0, gt=0, description="Longest wait for a worker's answer to a question about KV.")
    grace_s: float = Field(
        0.5, ge=0, description="After SIGTERM: seconds in which late requests of the frontend are still taken."
    )
    drain_s: float = Field(25.0, ge=0, le=30, description="After SIGTERM: seconds that rounds in progress may take.")

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.model_name or self.model.expanduser().resolve().name


def parse_params(flag: str, text: str) -> dict[str, Any]:
    """`name=value,name=value` as a dictionary; values are JSON where they can be read as such, else text.

    Raises:
        UserError: an entry without a name or a value.
    """
    params: dict[str, Any] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = (part.strip() for part in entry.partition("="))
        if not (name and separator and value):
            raise UserError(f"{PROG}: {flag}: {entry!r} is not of the form name=value")
        try:
            params[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            params[name.replace("-", "_")] = value
    return params


def context_length(folder: Path, chosen: int | None) -> int | None:
    """The longest context that the model card names: the chosen one, else the model's; None if neither says.

    Raises:
        UserError: config.json cannot be read.
    """
    if chosen is not None:
        return chosen
    try:
        config = json.loads((folder / "config.json").read_bytes())
        config = config.get("text_config") or config
        length = config.get("max_position_embeddings")
        return int(length) if length else None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{PROG}: --model: {folder / 'config.json'} is not usable ({error})") from None
