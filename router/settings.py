"""Settings of a coordinator process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import AliasChoices, Field

from ampd.errors import UserError
from ampd.keys import PAGE_TOKENS
from ampd.perf.presets import profile_names
from ampd.policies import defaults, registry
from ampd.sampling_limits import vocabulary_tokens
from ampd.serving.admission import MAX_ROUNDS
from ampd.settings import GraphSettings, Names
from ampd.types import Moves
from router.targets import TARGET_CAP, TARGET_FLOOR

PROG = "python -m router"

SUSPECT_S = 5.0
"""Seconds that a worker is left alone after a failed call, unless it publishes again."""

ACKNOWLEDGED_S = 60.0
"""In which a worker must take a call. After Dynamo's 5 s a worker would count as lost that is only slow because of
load.
Its lease and its connections show whether it lives."""
CALL_TIMEOUT_S = 2.0
"""Longest wait for a worker's answer to a question about KV."""


def tool_call_parsers() -> Sequence[str]:
    """The names of Dynamo's parsers of tool calls, sorted."""
    from dynamo._core import get_tool_parser_names

    return sorted(get_tool_parser_names())


def reasoning_parsers() -> Sequence[str]:
    """The names of Dynamo's parsers of reasoning, sorted."""
    from dynamo._core import get_reasoning_parser_names

    return sorted(get_reasoning_parser_names())


PARSER_NAMES = {"dyn_tool_call_parser": tool_call_parsers, "dyn_reasoning_parser": reasoning_parsers}
"""Setting -> the names that its value may have."""


def check_parser(flag: str, name: str | None, known: Sequence[str]) -> str | None:
    """The name, if it is a known one or None.

    Raises:
        UserError: it is unknown; the line begins with `flag` and lists the known ones.
    """
    if name is not None and name not in known:
        raise UserError(f"{flag}: unknown parser {name!r}; known: {', '.join(known)}")
    return name


class CoordinatorSettings(GraphSettings):
    """One AMPD coordinator: registers the model at the Dynamo frontend, binds sessions, routes every prefill."""

    known_names: ClassVar = {**registry.NAMES, **PARSER_NAMES, "perf": profile_names}
    model: Path = Field(description="Model folder (Hugging Face layout): tokenizer, chat template, config.")
    model_name: Names = Field(
        [],
        description="Name that clients use; default: the model folder's name. Repeat it for further names of the "
        "model.",
    )
    routing: str = Field(defaults.ROUTING, description="Policy that chooses where a round is prefilled.")
    binding: str = Field(defaults.BINDING, description="Policy that binds a new session to a decode worker.")
    pools: str = Field(defaults.POOLS, description="Policy that changes the workers' roles; static: none changes.")
    moves: Moves = Field(
        defaults.MOVES,
        description="Sessions that may move to another worker between two rounds, if that pays: those whose "
        "worker owns no sessions any more or is full (needed), any, or none (never).",
    )
    target_floor: float = Field(
        TARGET_FLOOR, gt=0, le=1, description="Tightest TTFT or ITL target of a client, as a multiple of the default."
    )
    target_cap: float = Field(
        TARGET_CAP, ge=1, description="Loosest TTFT or ITL target of a client, as a multiple of the default."
    )
    max_sessions: int = Field(
        100_000, ge=0, description="Live sessions of the graph, beyond which a new one gets 429. 0: any number."
    )
    max_sessions_per_tenant: int = Field(
        50_000, ge=0, description="Live sessions of one tenant; a new one beyond them gets 429. 0: any number."
    )
    kv_block_size: int = Field(PAGE_TOKENS, ge=1, description="Tokens per KV page of the workers' engines.")
    context_length: int | None = Field(
        None,
        ge=2,
        description="Longest prompt and output together; default: that of config.json, or the workers' if "
        "it is smaller.",
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
    max_rounds: int = Field(
        MAX_ROUNDS,
        ge=0,
        description="Rounds in progress from which this coordinator refuses further ones with 429; three "
        "quarters for the first round of a session. 0: any number.",
    )
    retries: int = Field(3, ge=0, description="Retries of a round that lost its worker, before the client gets 503.")
    grace_s: float = Field(0.5, ge=0, description="After SIGTERM: seconds in which late requests are still taken.")
    drain_s: float = Field(25.0, ge=0, le=30, description="After SIGTERM: seconds that rounds in progress may take.")

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.model_name[0] if self.model_name else self.model.expanduser().resolve().name


def context_length(folder: Path, chosen: int | None) -> int | None:
    """The longest context that the model card names: the chosen one, else the model's; None if neither says.

    Raises:
        UserError: config.json cannot be read.
    """
    if chosen is not None:
        return chosen
    return _from_config(folder, _longest_context)


def vocabulary_size(folder: Path) -> int | None:
    """The size of the model's vocabulary; None if its config.json does not name it.

    Raises:
        UserError: config.json cannot be read.
    """
    return _from_config(folder, vocabulary_tokens)


def _longest_context(config: dict[str, Any]) -> int | None:
    length = (config.get("text_config") or config).get("max_position_embeddings")
    return int(length) if length else None


def _from_config(folder: Path, read: Callable[[dict[str, Any]], int | None]) -> int | None:
    try:
        return read(json.loads((folder / "config.json").read_bytes()))
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{PROG}: --model: {folder / 'config.json'} is not usable ({error})") from None
