"""Rounds from recorded chat messages: token counts by a tokenizer, rewrites from the messages themselves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ampd.errors import UserError
from workloads.formats.registry import LoadOptions
from workloads.trace import Round

HEADER_TOKENS = 3
"""What a chat template puts before a message: start marker, role, new line (ChatML)."""
END_TOKENS = 1
"""What ends a message."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One model call: the prompt's messages and the message that the model answered with."""

    messages: tuple[str, ...]
    output: str


def message_words(message: dict[str, Any]) -> str:
    """What a model reads or writes of one OpenAI-style message: content, function and tool calls."""
    parts = [_words(message.get("content"))]
    if call := message.get("function_call"):
        parts.append(_call_words(call))
    parts += [_call_words(call.get("function") or {}) for call in message.get("tool_calls") or () if call]
    return "\n".join(part for part in parts if part)


def rounds_from_chat(calls: Sequence[ChatCall], options: LoadOptions, where: str) -> tuple[Round, ...]:
    """Rounds of a run of calls whose prompts are lists of messages.

    Every message costs its words plus the four tokens that ChatML puts around it; the answer's header belongs to the
    prompt. What a prompt shares with the previous context is the common prefix of their messages.

    Raises:
        UserError: no call at all.
    """
    if not calls:
        raise UserError(f"{where}: holds no model call")
    rounds: list[Round] = []
    context: tuple[str, ...] = ()
    for call in calls:
        common = _common_prefix(context, call.messages)
        new = call.messages[common:]
        rounds.append(
            Round(
                incr_tokens=_tokens(new, options) + HEADER_TOKENS,
                output_tokens=max(1, options.count_tokens(call.output)) + END_TOKENS,
                keep_tokens=None if common == len(context) else _tokens(context[:common], options),
                text="\n".join(new) if options.with_text else None,
            )
        )
        context = (*call.messages, call.output)
    return tuple(rounds)


def _common_prefix(left: Sequence[str], right: Sequence[str]) -> int:
    common = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        common += 1
    return common


def _tokens(messages: Sequence[str], options: LoadOptions) -> int:
    return sum(options.count_tokens(words) + HEADER_TOKENS + END_TOKENS for words in messages)


def _words(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content)
    return json.dumps(content, ensure_ascii=False)


def _call_words(call: dict[str, Any]) -> str:
    arguments = call.get("arguments")
    words = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{call.get('name') or ''} {words}"
