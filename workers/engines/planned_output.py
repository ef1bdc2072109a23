"""The outputs of a modelled engine that are not made up: scripted replies, also as answers within a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ampd.errors import UserError
from ampd.tokenizer_errors import as_value_errors
from workers.engines.base import EngineError, EngineRequest
from workers.engines.chat_template import ChatTemplate
from workers.engines.replies import Replies, Reply, ToolCall


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """The next tokens of an output. After them it ends, if it may.

    Attributes:
        is_all: nothing may follow them, whatever the request says of its end.
    """

    token_ids: Sequence[int]
    is_all: bool = False


class OutputPlanner:
    """Finds the planned output of a request.

    Args:
        folder: of the model.
        eos_token_ids: of the model.
        replies: None: no output is scripted.

    Raises:
        UserError: the chat template cannot render the replies.
    """

    def __init__(self, folder: Path, eos_token_ids: Sequence[int], replies: Replies | None = None) -> None:
        self._folder = folder
        self._script = None
        if replies is not None:
            self._script = _Script(replies, self._tokenizer, ChatTemplate(folder), eos_token_ids)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        try:
            with as_value_errors():
                return Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        except ValueError as error:
            raise UserError(f"model folder {self._folder}: tokenizer.json is not usable ({error})") from None

    def plan(self, request: EngineRequest) -> PlannedOutput | None:
        """The planned output of a request; None: its tokens are made up.

        Raises:
            EngineError: 400 because no scripted reply fits its grammar.
        """
        if request.max_new_tokens == 0:
            return None
        guide = (request.request.get("sampling_options") or {}).get("guided_decoding")
        reply = self._script.reply(request) if self._script else None
        if guide:
            text = _within(guide, reply)
            return PlannedOutput(self._tokenizer.encode(text, add_special_tokens=False).ids, is_all=True)
        if self._script is None or reply is None:
            return None
        rest = self._script.rest(request.token_ids, reply)
        return None if rest is None else PlannedOutput(rest)


class _Script:
    """Scripted replies as tokens.

    Both the turn and the part of its reply that exists already are read from the context, as the made-up tokens are.
    So every route and every worker gives the same output, without a message between them.
    """

    def __init__(
        self, replies: Replies, tokenizer: Tokenizer, template: ChatTemplate, eos_token_ids: Sequence[int]
    ) -> None:
        self._replies = replies
        self._tokenizer = tokenizer
        self._opening = template.opening
        ends = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in eos_token_ids]
        self._token_ids: dict[int, list[int]] = {}
        for reply in replies.all:
            text = reply.text if reply.text is not None else _cut(template.assistant(reply.message), ends)
            self._token_ids[id(reply)] = tokenizer.encode(text, add_special_tokens=False).ids

    def reply(self, request: EngineRequest) -> Reply | None:
        """The reply to a prompt by its turn; None: there is none."""
        # Without the space at its end, because a tokenizer may join that to the text of an older message.
        turn = self._text(request.token_ids).count(self._opening.rstrip()) - 1
        return self._replies.find(request.tenant, request.session_id, turn) if turn >= 0 else None

    def rest(self, context: Sequence[int], reply: Reply) -> list[int] | None:
        """The part of a reply that is not in the context yet; None: the context is not of this reply."""
        whole = self._token_ids[id(reply)]
        for known in range(min(len(whole), len(context)), -1, -1):
            before = len(context) - known
            # The last token first, because a long reply would be compared once per token of it otherwise.
            if known and context[-1] != whole[known - 1]:
                continue
            if list(context[before:]) != whole[:known]:
                continue
            # Each token has at least a byte, so these are enough to see the opening.
            nearby = context[max(0, before - 4 * len(self._opening)) : before]
            if self._text(nearby).endswith(self._opening):
                return whole[known:]
        return None

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def _cut(text: str, ends: Sequence[str]) -> str:
    """A rendered message without the mark of its end. Space before a tool call would reach the client as content."""
    found = [at for end in ends if end and (at := text.find(end)) >= 0]
    return text[: min(found)].strip() if found else text.strip()


def _within(guide: Mapping[str, Any], reply: Reply | None) -> str:
    """The scripted answer within a grammar: one of its choices, or JSON, which is not compared with the schema."""
    text = str(reply.text or reply.message.get("content") or "") if reply is not None else ""
    if choices := guide.get("choice"):
        if text and text in choices:
            return text
        raise _unscripted("one of the choices")
    if (schema := guide.get("json")) is None:
        raise EngineError("the modelled engine cannot follow a grammar of this kind, but JSON schemas and choices", 400)
    if reply is not None and reply.calls:
        return _as_asked(schema, reply.calls)
    if _is_json(text):
        return text
    raise _unscripted("JSON or has tool calls")


def _unscripted(needed: str) -> EngineError:
    return EngineError(
        "the modelled engine answers within a grammar by scripted replies only: "
        f"start it with --replies and a reply to this turn that is {needed}",
        400,
    )


def _as_asked(schema: Any, calls: Sequence[ToolCall]) -> str:
    """Scripted tool calls in the grammar of a `tool_choice`: a list (`required`), or the arguments of a named tool."""
    with suppress(ValueError, RecursionError):
        schema = json.loads(schema) if isinstance(schema, str) else schema
    if isinstance(schema, dict) and schema.get("type") == "array":
        return json.dumps([{"name": call.name, "parameters": dict(call.arguments)} for call in calls])
    return json.dumps(dict(calls[0].arguments))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
