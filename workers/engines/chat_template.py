"""A model's chat template, as far as a modelled engine needs it: how an assistant's message looks as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ampd.errors import UserError

_QUESTION = {"role": "user", "content": "x"}
_FAILURES = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
    SyntaxError,
    NameError,
)
"""What a template may raise besides jinja's own errors: it computes, and its source becomes Python."""


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
        except (TemplateError, *_FAILURES) as error:
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
        except (TemplateError, *_FAILURES) as error:
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
