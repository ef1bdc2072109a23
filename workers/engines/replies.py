"""Scripted replies of the modelled engine, with which an agent's loop is rehearsed without a GPU.

A file has the replies by session and turn. The model's chat template turns them into text as the model would write it,
so that Dynamo's tool-call parser of the family reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from tokenizers import Tokenizer

from ampd.documents import first_problem
from ampd.errors import UserError
from ampd.keys import is_branch_of, session_key
from ampd.model_folder import as_value_errors
from workers.engines.base import EngineError, EngineRequest

_CALL_ID = "call00000"


def _decoded(arguments: Any) -> Any:
    """Arguments as OpenAI writes them: JSON as text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None


class ToolCall(BaseModel):
    """A call of a tool: its name and arguments, also within a `function` as OpenAI writes it."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_decoded)] = {}

    @model_validator(mode="before")
    @classmethod
    def _of_openai(cls, call: Any) -> Any:
        return call.get("function") or call if isinstance(call, dict) else call


class Reply(BaseModel):
    """One line of the file.

    Attributes:
        session: whose line it is, by the client's id; "": of all sessions without lines of their own.
        text: the output word by word; None: the chat template makes it from `message`.
    """

    model_config = ConfigDict(extra="forbid")

    role: str = "assistant"
    session: str = ""
    text: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None

    @model_validator(mode="after")
    def _is_text_or_message(self) -> Self:
        if (self.text is None) == (not self.model_fields_set & {"content", "tool_calls"}):
            raise ValueError("give either text, or content and tool_calls")
        return self

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message in the form of OpenAI."""
        message: dict[str, Any] = {"content": self.content or ""}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": _CALL_ID, "type": "function", "function": call.model_dump()} for call in self.tool_calls
            ]
        return message


class Replies:
    """The replies of a file, by session and turn.

    Args:
        by_session: the lines that name a session, by the client's id of it; "": the lines for all other sessions.
    """

    def __init__(self, by_session: Mapping[str, Sequence[Reply]]) -> None:
        self._by_session = by_session

    @classmethod
    def read(cls, path: Path) -> Replies:
        """Read a file of JSON lines; docs/workers.md describes them.

        Raises:
            UserError: it cannot be read, or a line is wrong.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UserError(f"--replies: {path} cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise UserError(f"--replies: {path} is not UTF-8 text") from None
        by_session: dict[str, list[Reply]] = {}
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    reply = Reply.model_validate_json(line)
                except ValidationError as error:
                    raise UserError(f"--replies: {path}:{number}: {first_problem(error)}") from None
                by_session.setdefault(reply.session, []).append(reply)
        if not by_session:
            raise UserError(f'--replies: {path} has no reply; a line is {{"content": "..."}}')
        return cls(by_session)

    @property
    def all(self) -> list[Reply]:
        return [reply for replies in self._by_session.values() for reply in replies]

    def find(self, tenant: str, session: str, turn: int) -> Reply | None:
        """The reply of a turn; None: the script has ended.

        Args:
            session: its name inside of the graph, see `ampd.keys`.
            turn: the number of the assistant's messages in the prompt.
        """
        own = (name for name in self._by_session if name and is_branch_of(session, session_key(tenant, name)))
        replies = self._by_session.get(next(own, ""), ())
        return replies[turn] if turn < len(replies) else None


# -- as the model would write them


_QUESTION = {"role": "user", "content": "x"}


class ChatTemplate:
    """Renders messages as the model was trained to see them.

    The template knows the format of the family's tool calls, so there is no list of formats here. Dynamo's tool-call
    parser of the family reads the same format.

    Attributes:
        opening: the text that opens the assistant's next message.

    Raises:
        UserError: the model folder has no usable chat template.
    """

    def __init__(self, folder: Path) -> None:
        config = _config(folder)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": datetime.now().strftime}
        marks = {name: _text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self._folder = folder
        try:
            self._template = environment.from_string(_source(folder, config), globals=marks)
        except Exception as error:  # its source becomes Python
            raise UserError(f"model folder {folder}: the chat template is not usable ({error})") from None
        self._question = self._render([_QUESTION], opened=True)
        self.opening = self._question.removeprefix(self._render([_QUESTION], opened=False))
        if not self.opening.strip():
            raise UserError(f"model folder {folder}: the chat template opens no message of the assistant")

    def assistant(self, message: Mapping[str, Any]) -> str:
        """The text of an assistant's message after its opening, with what the template puts at its end.

        Raises:
            UserError: the template cannot render it.
        """
        text = self._render([_QUESTION, {"role": "assistant", "content": "", **message}], opened=False)
        if not text.startswith(self._question):
            raise UserError(f"model folder {self._folder}: the chat template opens finished messages in another way")
        return text.removeprefix(self._question)

    def _render(self, messages: list[Any], *, opened: bool) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=opened, tools=None)
        except Exception as error:  # it computes
            raise UserError(f"model folder {self._folder}: the chat template failed: {error}") from None


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"model folder {folder}: tokenizer_config.json is not usable ({error})") from None
    if not isinstance(config, Mapping):
        raise UserError(f"model folder {folder}: tokenizer_config.json is not usable (it is not an object)")
    return config


def _source(folder: Path, config: Mapping[str, Any]) -> str:
    source = config.get("chat_template")
    if isinstance(source, list):  # several templates by name
        named = [entry for entry in source if isinstance(entry, Mapping)]
        source = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if (file := folder / "chat_template.jinja").is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"model folder {folder}: {file.name} cannot be read ({error})") from None
    if not source:
        raise UserError(f"model folder {folder} has no chat template")
    return str(source)


def _text(token: Any) -> str:
    """A special token, which the file gives as text or with its properties."""
    return str(token.get("content", "") if isinstance(token, Mapping) else token or "")


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)


# -- as outputs


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
    text = reply.text or reply.content or "" if reply is not None else ""
    if choices := guide.get("choice"):
        if text and text in choices:
            return text
        raise _unscripted("one of the choices")
    if (schema := guide.get("json")) is None:
        raise EngineError("the modelled engine cannot follow a grammar of this kind, but JSON schemas and choices", 400)
    if reply is not None and reply.tool_calls:
        return _as_asked(schema, reply.tool_calls)
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
