"""The description of the model that the coordinator registers at the frontends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from router.settings import PROG, CoordinatorSettings, context_length, vocabulary_size


class ModelCard:
    """The model's name, limits and parsers, checked before anything starts.

    Raises:
        UserError: a parser or the template does not exist, or config.json cannot be read.
    """

    def __init__(self, settings: CoordinatorSettings, folder: Path) -> None:
        from dynamo._core import get_reasoning_parser_names, get_tool_parser_names

        self.folder = folder
        self.name = settings.served_name
        self.context_length = context_length(folder, settings.context_length)
        self.vocabulary_size = vocabulary_size(folder)
        self.tool_call_parser = _known("--dyn-tool-call-parser", settings.dyn_tool_call_parser, get_tool_parser_names())
        self.reasoning_parser = _known(
            "--dyn-reasoning-parser", settings.dyn_reasoning_parser, get_reasoning_parser_names()
        )
        self.template = _template(settings.custom_jinja_template)
        self.kv_block_size = settings.kv_block_size

    async def register(self, endpoint: Any) -> None:
        """Make the model known to the frontends."""
        from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model

        config = ModelRuntimeConfig()
        config.context_length = self.context_length
        config.tool_call_parser = self.tool_call_parser
        config.reasoning_parser = self.reasoning_parser
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            str(self.folder),
            self.name,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=self.kv_block_size,
            runtime_config=config,
            custom_template_path=self.template,
        )


def _known(flag: str, name: str | None, known: Sequence[str]) -> str | None:
    if name is not None and name not in known:
        raise UserError(f"{PROG}: {flag}: unknown parser {name!r}; known: {', '.join(sorted(known))}")
    return name


def _template(path: Path | None) -> str | None:
    if path is None:
        return None
    expanded = Path(os.path.expandvars(path)).expanduser().resolve()
    if not expanded.is_file():
        raise UserError(f"{PROG}: --custom-jinja-template: no file at {expanded}")
    return str(expanded)
