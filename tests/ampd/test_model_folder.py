"""The digest of a model folder: equal for copies, different for every change that KV depends on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ampd.model_folder import model_digest
from ampd.tiny_model import TinyModel, make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def _one_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = sorted(weights)[-1]
    save_file({**weights, name: weights[name] * np.float32(1.01)}, file, metadata={"format": "pt"})


def _append(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(b" ")

    return change


def _middle_of_a_bin(folder: Path) -> None:
    content = bytearray(3 << 20)
    content[2 << 20 : (2 << 20) + 20_000] = b"x" * 20_000
    (folder / "pytorch_model.bin").write_bytes(content)


def test_copies_have_one_digest(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / "README.md").write_text("a copy")
    (copy / "generation_config.json").write_text('{"temperature": 0.1}')
    assert model_digest(copy) == model_digest(model)


@pytest.mark.parametrize(
    "change",
    [
        _one_tensor,
        _append("config.json"),
        _append("tokenizer.json"),
        _append("model.safetensors"),
        lambda folder: (folder / "extra.pt").write_bytes(b"weights"),
        lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
    ],
    ids=["tensor", "config", "tokenizer", "length", "pt", "name"],
)
def test_a_change_changes_the_digest(model: Path, tmp_path: Path, change: Callable[[Path], object]) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    change(copy)
    assert model_digest(copy) != model_digest(model)


def test_other_weights_of_equal_sizes_differ(model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "tiny", TinyModel(seed=1))
    assert (other / "model.safetensors").stat().st_size == (model / "model.safetensors").stat().st_size
    assert model_digest(other) != model_digest(model)


def test_weights_of_other_formats_are_sampled(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(3 << 20))
    before = model_digest(tmp_path)
    _middle_of_a_bin(tmp_path)
    assert model_digest(tmp_path) != before


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 16, b"\x02" + bytes(7) + b"[]", b"\x01" + bytes(7) + b"["]
)
def test_a_file_that_is_no_safetensors_has_a_digest(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    before = model_digest(tmp_path)
    file.write_bytes(content + b"x")
    assert model_digest(tmp_path) != before


@pytest.mark.parametrize("offsets", ["[-8, 8]", "[0.5, 8]", "[0, 10000000000000000000]", "[8, 0]", '["a", 1]', "1"])
def test_a_header_with_wrong_offsets_is_sampled_as_another_file(tmp_path: Path, offsets: str) -> None:
    header = f'{{"a": {{"dtype": "F32", "shape": [2], "data_offsets": {offsets}}}}}'.encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    digest = model_digest(path)
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(7) + b"x")
    assert model_digest(path) != digest
