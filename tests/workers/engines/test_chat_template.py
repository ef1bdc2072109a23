"""Messages of an assistant in the formats of model families."""

import json
from pathlib import Path

import pytest

from ampd.errors import UserError
from workers.engines.replies import ChatTemplate

CALL = {"type": "function", "function": {"name": "search", "arguments": {"q": "ü"}}}

LLAMA = """{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
    {%- if m.tool_calls %}
        {%- set f = m.tool_calls[0].function %}
        {{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}
    {%- else %}{{- m.content | trim }}{%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""


def _folder(folder: Path, template: object, **config: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
    return folder


def test_hermes(model_folder: Path) -> None:
    template = ChatTemplate(model_folder)
    assert template.opening == "<|im_start|>assistant\n"
    assert template.assistant({"content": "hi"}) == "hi<|im_end|>\n"
    text = template.assistant({"tool_calls": [CALL]})
    assert text == '\n<tool_call>\n{"name": "search", "arguments": {"q": "ü"}}\n</tool_call><|im_end|>\n'


def test_another_family(tmp_path: Path) -> None:
    template = ChatTemplate(_folder(tmp_path, LLAMA, bos_token={"content": "<|begin_of_text|>"}))
    assert template.opening == "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert template.assistant({"tool_calls": [CALL]}) == '{"name": "search", "parameters": {"q": "ü"}}<|eot_id|>'


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    entries = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": LLAMA}]
    assert "assistant" in ChatTemplate(_folder(tmp_path, entries)).opening


def test_a_file_of_its_own_wins(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(LLAMA)
    assert "assistant" in ChatTemplate(_folder(tmp_path, None)).opening


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has no chat template"),
        (["default", {"name": "default"}], "has no chat template"),
        ("{% if %}", "not usable"),
        ("{{ raise_exception('no users') }}", "no users"),
        ("{{ messages[0].content }}", "opens no message"),
    ],
)
def test_an_unusable_template_is_one_line(tmp_path: Path, template: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ChatTemplate(_folder(tmp_path, template))


def test_a_folder_without_configuration_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tokenizer_config"):
        ChatTemplate(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", r"is not usable \(it is not an object"),
        ("{", "is not usable"),
        pytest.param("[" * 100_000, "is not usable", id="nested"),
    ],
)
def test_a_configuration_that_is_no_object_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(UserError, match=rf"tokenizer_config\.json {words}") as refusal:
        ChatTemplate(tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_template_that_is_not_utf_8_is_one_line(tmp_path: Path) -> None:
    (_folder(tmp_path, LLAMA) / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate(tmp_path)
