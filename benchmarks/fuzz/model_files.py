"""Files of models, of measurements and of tables, as users have them: each reader, and what goes on from there."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ampd_rivals.ppd.table_file import DEFAULT_TABLE, read_table

from ampd.cli.doctor import judge_model, read_model
from ampd.errors import UserError
from ampd.model_folder import model_digest, tokenizer_digest
from ampd.tiny_model import tiny_model_path
from benchmarks.fuzz.mutations import changed_bytes, changed_json, changed_text
from benchmarks.fuzz.target import Target
from workers.engines.modelled_tokens import ContextHash, TokenSource, read_model_folder
from workers.engines.replies import ChatTemplate
from workloads.formats.loader import load_counter

_TOKENIZER: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "\u0120word": 2, "ab": 3}, "merges": ["a b"]},
    "added_tokens": [{"id": 4, "content": "<end>", "special": True}],
    "normalizer": None,
}
_UNIGRAM: dict[str, Any] = {
    **_TOKENIZER,
    "model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], ["b", -2.0]]},
}
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message.content | trim }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "chat_template": _TEMPLATE,
}  # fmt: skip
_MESSAGES: tuple[dict[str, Any], ...] = (
    {"content": "done"},
    {"content": "", "tool_calls": [{"type": "function", "function": {"name": "get", "arguments": {"city": "Rome"}}}]},
)
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16", "eos_token_id": [2], "layer_types": ["full_attention"], "text_config": None,
}  # fmt: skip
_TENSORS: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [3000], "data_offsets": [0, 12_000]},
    "b": {"dtype": "F32", "shape": [1000], "data_offsets": [12_000, 16_000]},
}
_TEXT = "a word, and 12 more: abc \u00e9\u4e00"


def targets(folder: Path) -> Iterator[Target]:
    """The readers of files. `folder`: for them."""
    make = partial(_file, folder)
    yield make("tokenizer digest", lambda rng: _json(rng, rng.choice((_TOKENIZER, _UNIGRAM))), _digest_tokenizer, ())
    yield make("chat template", _template, _render, (UserError,))
    yield make("weights digest", _weights, _digest_weights, ())
    yield make("model folder", lambda rng: _json(rng, rng.choice((_CONFIG, _TOKENIZER))), _model_facts, (UserError,))
    yield make("model of the doctor", lambda rng: _json(rng, _CONFIG), _doctor, (UserError,))
    yield make("tokenizer of a trace", lambda rng: _json(rng, rng.choice((_TOKENIZER, _UNIGRAM))), _count, (UserError,))
    table = json.loads(DEFAULT_TABLE.read_text("utf-8"))
    yield make("routing table", lambda rng: _json(rng, table), _route, (UserError,))


def _file(
    folder: Path,
    name: str,
    make: Callable[[random.Random], bytes],
    run: Callable[[Path, bytes], None],
    refusals: tuple[type[BaseException], ...],
) -> Target:
    """A target with a folder of its own."""
    own = folder / name.replace(" ", "-")
    own.mkdir()
    return Target(name, make, partial(run, own), refusals)


def _json(rng: random.Random, value: Any) -> bytes:
    data = changed_json(rng, value).encode("utf-8", "surrogatepass")
    return changed_bytes(rng, data) if rng.random() < 0.1 else data


def _digest_tokenizer(folder: Path, data: bytes) -> None:
    """Two tokenizers with the same digest give all token ids the same text."""
    valid = {_digest_of(folder, json.dumps(value).encode()): _meanings(value) for value in (_TOKENIZER, _UNIGRAM)}
    digest = _digest_of(folder, data)
    assert digest == "" or (len(digest) == 16 and int(digest, 16) >= 0)
    if digest in valid:
        assert _meanings(json.loads(data)) == valid[digest]


def _digest_of(folder: Path, data: bytes) -> str:
    (folder / "tokenizer.json").write_bytes(data)
    return tokenizer_digest(folder)


def _meanings(tokenizer: Any) -> set[tuple[str, int]]:
    vocab = tokenizer["model"]["vocab"]
    listed = vocab.items() if isinstance(vocab, dict) else ((entry[0], at) for at, entry in enumerate(vocab))
    added = ((entry["content"], entry["id"]) for entry in tokenizer.get("added_tokens") or ())
    return {(str(token), int(token_id)) for token, token_id in (*listed, *added)}


def _template(rng: random.Random) -> bytes:
    if rng.random() < 0.7:
        template: Any = changed_text(rng, changed_text(rng, _TEMPLATE))
        if rng.random() < 0.2:
            template = [{"name": "default", "template": template}]
        return json.dumps({**_TOKENIZER_CONFIG, "chat_template": template}).encode()
    return _json(rng, _TOKENIZER_CONFIG)


def _render(folder: Path, data: bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(data)
    template = ChatTemplate(folder)
    assert template.opening.strip()
    for message in _MESSAGES:
        assert isinstance(template.assistant(message), str)


def _weights(rng: random.Random) -> bytes:
    header = changed_json(rng, _TENSORS).encode("utf-8", "surrogatepass")
    data = len(header).to_bytes(8, "little") + header + bytes(range(250)) * 64
    return changed_bytes(rng, data) if rng.random() < 0.4 else data


def _digest_weights(folder: Path, data: bytes) -> None:
    """The digest is that of the contents: the same again, and another one for another header, size or configuration."""
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(data)
    digest = model_digest(folder)
    assert len(digest) == 64
    assert model_digest(folder) == digest
    (folder / "config.json").write_bytes(b"{ }")
    assert model_digest(folder) != digest
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(data + b"x")
    assert model_digest(folder) != digest
    for other in (bytes([data[0] ^ 1]) + data[1:] if data else b"x", data.replace(b"F32", b"I32", 1)):
        (folder / "model.safetensors").write_bytes(other)
        assert model_digest(folder) != digest or other == data


def _model_facts(folder: Path, data: bytes) -> None:
    """The changed file takes the place of the one that it looks like."""
    for name, value in (("config.json", _CONFIG), ("tokenizer.json", _TOKENIZER)):
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    (folder / ("tokenizer.json" if b"added_tokens" in data else "config.json")).write_bytes(data)
    facts = read_model_folder(folder)
    assert facts.printable
    assert facts.max_context_tokens > 0
    assert facts.kv_bytes_per_token > 0
    assert facts.vocabulary_size is None or facts.vocabulary_size > 0
    assert all(isinstance(token_id, int) for token_id in facts.eos_token_ids)
    token = TokenSource(facts).choose(ContextHash([1, 2]), 0, None, 2)
    assert isinstance(token.token_id, int)
    assert token.token_id >= 0


def _doctor(folder: Path, data: bytes) -> None:
    """It is judged, or refused."""
    if not (folder / "tokenizer.json").exists():
        shutil.copy(tiny_model_path() / "tokenizer.json", folder)
        (folder / "model.safetensors").write_bytes(b"x" * 100)
    (folder / "config.json").write_bytes(data)
    reading = read_model(str(folder), 1)
    assert reading.architecture
    assert reading.architecture
    assert judge_model(reading, 1, [], 1 << 34).found


def _count(folder: Path, data: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(data)
    assert load_counter(folder)(_TEXT) >= 0


def _route(folder: Path, data: bytes) -> None:
    (folder / "table.json").write_bytes(data)
    table = read_table(folder / "table.json")
    for tokens in (0, 1, 1000, 10**9):
        assert table.routes[table.cell(tokens, tokens, table.expected_output_tokens, tokens / 100)]
