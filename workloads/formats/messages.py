"""Rounds from recorded chat messages: token counts by a tokenizer, rewrites from the messages themselves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from ampd.errors import UserError
from workloads.formats.chain import common_prefix
from workloads.formats.loader import LoadOptions
from workloads.trace import Round, SharedPrefix

HEADER_TOKENS = 3
"""Tokens of a chat template before a message: start marker, role, new line (ChatML)."""
_SYSTEM = ("system", "developer")

END_TOKENS = 1
"""Tokens of a chat template after a message."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One model call: the messages of the prompt, and the answer.

    Attributes:
        system_messages: how many of the first messages are tools and system prompts, which agents of a kind share.
        gap_s: seconds between the previous call and this one; 0: not recorded.
    """

    messages: tuple[str, ...]
    output: str
    system_messages: int = 0
    gap_s: float = 0.0


def message_words(message: dict[str, Any]) -> str:
    """The words of one OpenAI-style message for a model: content, function and tool calls."""
    parts = [_words(message.get("content"))]
    if call := message.get("function_call"):
        parts.append(_call_words(call))
    parts += [_call_words(call.get("function") or {}) for call in message.get("tool_calls") or () if call]
    return "\n".join(part for part in parts if part)


def rounds_from_chat(calls: Sequence[ChatCall], options: LoadOptions, where: str) -> tuple[Round, ...]:
    """Rounds of a run of calls whose prompts are lists of messages.

    Every message costs its words plus the four tokens that ChatML puts around it; the answer's header belongs to the
    prompt. A prompt shares the common prefix of messages with the previous context.

    Raises:
        UserError: no call at all.
    """
    if not calls:
        raise UserError(f"{where}: holds no model call")
    rounds: list[Round] = []
    context: tuple[str, ...] = ()
    for call in calls:
        common = common_prefix(context, call.messages)
        new = call.messages[common:]
        rounds.append(
            Round(
                incr_tokens=_tokens(new, options) + HEADER_TOKENS,
                output_tokens=max(1, options.count_tokens(call.output)) + END_TOKENS,
                tool_s=call.gap_s,
                keep_tokens=None if common == len(context) else _tokens(context[:common], options),
                text="\n".join(new) if options.with_text else None,
            )
        )
        context = (*call.messages, call.output)
    return tuple(rounds)


def shared_prefix_of(call: ChatCall, options: LoadOptions) -> SharedPrefix | None:
    """The tools and system prompts that a session's first call begins with, named by their words; None: it has none."""
    words = call.messages[: call.system_messages]
    if not words:
        return None
    name = sha256(json.dumps(words).encode()).hexdigest()[:16]
    return SharedPrefix(id=f"system-{name}", tokens=_tokens(words, options))


def leading_system(messages: Sequence[dict[str, Any]]) -> int:
    """How many of a conversation's first messages are system prompts."""
    return next((at for at, each in enumerate(messages) if each.get("role") not in _SYSTEM), len(messages))


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
