"""The description of the model that the coordinator registers at the frontends."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ampd.discovery_entries import deletes_silent_entries
from ampd.errors import UserError
from ampd.model_folder import tokenizer_digest
from ampd.types import WorkerView
from router.other_cards import OtherCards
from router.settings import (
    PROG,
    CoordinatorSettings,
    check_parser,
    context_length,
    reasoning_parsers,
    tool_call_parsers,
    vocabulary_size,
)

log = logging.getLogger(__name__)

_GONE_S = 1.0
"""Time in which the frontends notice that the last card of a model is gone."""


class ModelCard:
    """The model's name, limits and parsers, checked before anything starts.

    Raises:
        UserError: a parser or the template does not exist, or config.json cannot be read.
    """

    def __init__(self, settings: CoordinatorSettings, folder: Path) -> None:
        self.folder = folder
        self.name = settings.served_name
        self._further_names = settings.model_name[1:]
        self.context_length = context_length(folder, settings.context_length)
        self.vocabulary_size = vocabulary_size(folder)
        self.tokenizer = tokenizer_digest(folder)
        self.tool_call_parser = check_parser(
            f"{PROG}: --dyn-tool-call-parser", settings.dyn_tool_call_parser, tool_call_parsers()
        )
        self.reasoning_parser = check_parser(
            f"{PROG}: --dyn-reasoning-parser", settings.dyn_reasoning_parser, reasoning_parsers()
        )
        self.template = _template(settings.custom_jinja_template)
        self.kv_block_size = settings.kv_block_size
        self._registered: tuple[int | None] | None = None

    @property
    def registered_tokens(self) -> int:
        """The context with which the model is registered, or will be in a moment; 0: it is not, or without a limit."""
        return (self._registered[0] or 0) if self._registered else 0

    async def register(self, endpoint: Any, worker_context_tokens: int | None, others: OtherCards) -> None:
        """Register the model with the frontends, and again if the workers accept less than was thought.

        With discovery by files also if nothing has changed: others have deleted the card if this process stood still.

        The frontends refuse prompts that are longer than the registered context, with a reason that reaches the client
        also in streams and with tools.

        Args:
            worker_context_tokens: the longest context that the workers accept; None: not known yet.
            others: the cards of the other coordinators, which must not differ.
        """
        known = [tokens for tokens in (self.context_length, worker_context_tokens) if tokens is not None]
        context_tokens = min(known, default=None)
        if self._registered is not None:
            if self._registered == (context_tokens,):
                if deletes_silent_entries():
                    await self.register_again(endpoint)
                return
            await self._unregister(endpoint)
            self._registered = None
            await others.until_none_differs(context_tokens or 0)
            # A frontend that finds the card changed, and not gone, keeps the old one.
            await asyncio.sleep(_GONE_S)
            log.info("the workers accept %s tokens: the model is registered with this context", context_tokens)
        self._registered = (context_tokens,)
        await others.tell()
        await self._register(endpoint, context_tokens)

    async def register_again(self, endpoint: Any) -> None:
        """Write the card that discovery has lost once more, as it was."""
        if self._registered is not None:
            await self._register(endpoint, *self._registered)

    async def _unregister(self, endpoint: Any) -> None:
        from dynamo.llm import unregister_model

        try:
            await unregister_model(endpoint)
        except Exception as error:
            if not deletes_silent_entries():
                raise
            log.warning("the model's card is gone already, as after a standstill of this process: %s", error)

    async def _register(self, endpoint: Any, context_tokens: int | None) -> None:
        from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model

        config = ModelRuntimeConfig()
        config.context_length = context_tokens
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
            model_aliases=self._further_names or None,
        )


def smallest_context_tokens(workers: Iterable[WorkerView]) -> int | None:
    """The longest context that each of the workers accepts, prompt and output together; None: not known."""
    return min((view.max_context_tokens for view in workers if view.max_context_tokens), default=None)


def _template(path: Path | None) -> str | None:
    if path is None:
        return None
    expanded = Path(os.path.expandvars(path)).expanduser().resolve()
    if not expanded.is_file():
        raise UserError(f"{PROG}: --custom-jinja-template: no file at {expanded}")
    return str(expanded)
