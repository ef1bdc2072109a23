"""What tests of rounds share: messages, an ordering that can be replaced, and an engine that notes its calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from ampd.handler_stream import Chunk, HandlerStream, Send
from ampd.keys import pack_tokens
from ampd.policies.base import OrderingSituation, Pick
from ampd.wire import GenerateRequest
from workers.engines.base import EngineOutput, EngineRequest


@dataclass
class Switched:
    """An ordering policy that can be replaced while it is in use."""

    now: Any

    def pick(self, situation: OrderingSituation) -> Pick:
        return cast(Pick, self.now.pick(situation))


class Recorded:
    """An engine, and the calls it got: (prompt tokens, new tokens asked for, cached tokens).

    Args:
        on_first: called with (prompt tokens, new tokens asked for) at each call's first output.
    """

    def __init__(self, engine: Any, on_first: Callable[[int, int | None], None] = lambda *_: None) -> None:
        self._engine = engine
        self._on_first = on_first
        self.calls: list[tuple[int, int | None, int]] = []
        self.are_copies: list[bool] = []
        self.requests: list[EngineRequest] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self.calls.append((len(request.token_ids), request.max_new_tokens, -1))
        self.are_copies.append(request.is_copy)
        self.requests.append(request)
        mine = len(self.calls) - 1
        is_first = True
        async with aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                if is_first:
                    is_first = False
                    self._on_first(len(request.token_ids), request.max_new_tokens)
                if output.finish_reason:
                    self.calls[mine] = (len(request.token_ids), request.max_new_tokens, output.cached_tokens)
                yield output


def chunks_of(served: Callable[[Any, Send[Chunk]], Coroutine[Any, Any, None]], request: Any) -> HandlerStream[Chunk]:
    """The chunks of an endpoint's answer."""
    return HandlerStream(partial(served, request))


def message(
    prompt: list[int],
    new: int,
    session: str,
    *,
    hist: int = 0,
    ttft_s: float = 1.0,
    itl_s: float = 0.1,
    source: str | None = None,
    **request: Any,
) -> GenerateRequest:
    return {
        "task": {
            "task_id": session,
            "session_id": session,
            "hist_tokens": hist,
            "incr_tokens": len(prompt) - hist,
            "arrival_s": 0.0,
            "slo": {"ttft_s": ttft_s, "itl_s": itl_s},
        },
        "prompt": pack_tokens(prompt),
        "source": (source, None, "") if source else None,
        "is_prefilled": source is not None,
        "request": {"stop_conditions": {"max_tokens": new}, **request},
    }


def out(chunks: list[dict[str, Any]], index: int = 0) -> list[int]:
    return [token for chunk in chunks if chunk["index"] == index for token in chunk["token_ids"]]
