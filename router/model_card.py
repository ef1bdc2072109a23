"""The description of the model that the coordinator registers at the frontends."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from ampd.discovery_entries import deletes_silent_entries
from ampd.errors import UserError
from ampd.model_folder import tokenizer_digest
from ampd.state.redis_store import StateStore
from ampd.state.store import StateUnavailableError
from ampd.types import WorkerView
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


class OtherCards:
    """The cards with which the other coordinators have registered the model.

    A frontend refuses a card that differs from the one that it has, and keeps to that while any coordinator has the
    old one. So coordinators that learn of another context all take their cards away before the first one registers.

    Args:
        coordinator_id: of this coordinator.
        publish: writes this coordinator's view, with the context of its card, to the shared state.
        timeout_s: longest wait for the others, of which one may hang.
    """

    def __init__(
        self,
        store: StateStore,
        coordinator_id: str,
        publish: Callable[[], Awaitable[None]],
        timeout_s: float = 30.0,
        poll_s: float = 0.1,
    ) -> None:
        self._store = store
        self._coordinator_id = coordinator_id
        self._publish = publish
        self._timeout_s = timeout_s
        self._poll_s = poll_s

    async def tell(self) -> None:
        """Tell the others of our card before the frontends see it, so that none of them registers another meanwhile."""
        await self._publish()

    async def until_none_differs(self, context_tokens: int) -> None:
        """Wait until each other coordinator has registered the model with this context, or not at all."""
        different: list[str] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                while different := await self._different(context_tokens):  # noqa: ASYNC110
                    await asyncio.sleep(self._poll_s)
        except TimeoutError:
            log.warning(
                "coordinators %s have still registered the model with another context: frontends may keep it until "
                "they end",
                ", ".join(different),
            )
        except StateUnavailableError as error:
            log.warning("the cards of other coordinators are not known: %s", error)

    async def _different(self, context_tokens: int) -> list[str]:
        views = [heard.view for heard in (await self._store.overview()).coordinators]
        return [
            view.coordinator_id
            for view in views
            if view.coordinator_id != self._coordinator_id and view.context_tokens not in (0, context_tokens)
        ]


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
