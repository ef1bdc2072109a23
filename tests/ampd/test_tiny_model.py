"""The tiny model: the same bytes for the same sizes, a tokenizer for any text, a template that takes tools."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from ampd.tiny_model import TinyModel, main, make_tiny_model, tiny_model_path

SMALL = TinyModel(layers=2, hidden_size=64, heads=2, kv_heads=1, head_dim=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", SMALL)


def test_the_same_sizes_give_the_same_bytes(model: Path, tmp_path: Path) -> None:
    again = make_tiny_model(tmp_path / "again", SMALL)
    assert {file.name: file.read_bytes() for file in again.iterdir()} == {
        file.name: file.read_bytes() for file in model.iterdir()
    }
    other = make_tiny_model(tmp_path / "other", TinyModel(**{**SMALL_FIELDS, "seed": 1}))
    assert (other / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()


SMALL_FIELDS = {name: getattr(SMALL, name) for name in TinyModel.__slots__}


def test_the_cache_is_keyed_by_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = tiny_model_path(SMALL)
    assert first.is_relative_to(tmp_path)
    made_ns = (first / "config.json").stat().st_mtime_ns
    assert tiny_model_path(SMALL) == first
    assert (first / "config.json").stat().st_mtime_ns == made_ns
    assert tiny_model_path(TinyModel(**{**SMALL_FIELDS, "seed": 7})) != first
    assert not [file for file in first.parent.iterdir() if file.name.startswith(".")]


@given(text=st.text(max_size=40))
def test_any_text_survives_the_tokenizer(model: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_weights_have_the_shapes_of_the_config(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (32, 64)
    assert len([name for name in weights if "q_proj" in name]) == config["num_hidden_layers"]
    ends = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    assert not np.any(weights["lm_head.weight"][ends])


def test_the_template_writes_tools_calls_and_answers(model: Path) -> None:
    template = json.loads((model / "tokenizer_config.json").read_text())["chat_template"]
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    text = (
        Environment()
        .from_string(template)
        .render(
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "mild"},
            ],
            tools=[{"type": "function", "function": {"name": "get_weather"}}],
            add_generation_prompt=True,
        )
    )
    assert text.startswith("<|im_start|>system\nBe brief.")
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in text
    assert "<tool_response>\nmild\n</tool_response>" in text
    assert text.count("<|im_start|>system") == 1
    assert text.endswith("<|im_start|>assistant\n")


def test_the_command_makes_it_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--output={tmp_path / 'models' / 'tiny'}"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "models" / "tiny")
    assert json.loads((tmp_path / "models" / "tiny" / "config.json").read_text())["model_type"] == "llama"


def test_another_user_may_read_it(model: Path) -> None:
    assert {file.stat().st_mode & 0o777 for file in model.iterdir()} == {0o644}
    assert model.stat().st_mode & 0o777 == 0o755


def test_the_commands_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    (tmp_path / "file").write_text("")
    assert main(["--output", str(tmp_path / "file" / "tiny")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("--output" in line for line in lines)
