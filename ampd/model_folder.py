"""The model folder that every process reads: whether it is one, digests of its contents, and its tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from ampd.errors import UserError

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")


def check_model_folder(folder: Path, prog: str) -> Path:
    """The absolute path of a model folder in Hugging Face layout with its tokenizer. Weights are not checked.

    Raises:
        UserError: it is not such a folder; the line starts with `prog` and tells how to fix it.
    """
    given, folder = folder, folder.expanduser().resolve()
    if not folder.is_dir():
        # As in Qwen/Qwen3-8B.
        is_name = not given.is_absolute() and len(given.parts) == 2 and given.parts[0] not in (".", "..", "~")
        hint = f"; a model of the Hugging Face hub is downloaded first: hf download {given} --local-dir FOLDER"
        raise UserError(
            f"{prog}: --model: no folder at {folder}; give a model folder in Hugging Face layout"
            f"{hint if is_name else ''}"
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"{prog}: --model: {folder} has no config.json; give a model folder in Hugging Face layout")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError(
            f"{prog}: --model: {folder} has no tokenizer (tokenizer.json); copy the model's tokenizer files into it"
        )
    return folder


_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_TEXTS = ("*.json", "*.py", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
_WITHOUT_EFFECT = frozenset({"generation_config.json"})
_BLOCK_BYTES = 4096
_BLOCKS_PER_TENSOR = 2
_BLOCKS_PER_FILE = 256
_TAIL_BYTES = 1 << 20
_HEADER_BYTES = 100 << 20


def model_digest(path: Path) -> str:
    """A digest of a model folder, or of one file of weights, in hexadecimal.

    Weights are sampled, so that tens of gigabytes take a fraction of a second: of a safetensors file the header and two
    blocks of each tensor, of another file 256 blocks and its end, where PyTorch has the checksums of all tensors. So
    two trainings differ, but a safetensors file in which only a few rows of a tensor were edited may not. Configuration
    and tokenizer are read whole.

    Raises:
        OSError: a file cannot be read.
    """
    digest = sha256()
    for file in [path] if path.is_file() else _files(path):
        with file.open("rb") as stream:
            for part in _sampled(stream) if _is_weights(file) else [stream.read()]:
                digest.update(sha256(part).digest())
        digest.update(f"{file.name if file != path else ''} {file.stat().st_size}\n".encode())
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    found = {file for pattern in (*_WEIGHTS, *_TEXTS) for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in found if file.name not in _WITHOUT_EFFECT)


def _is_weights(file: Path) -> bool:
    return any(file.match(pattern) for pattern in _WEIGHTS)


def _sampled(stream: BinaryIO) -> Iterator[bytes]:
    size = os.fstat(stream.fileno()).st_size
    header = _safetensors_header(stream, size) if stream.name.endswith(".safetensors") else b""
    try:
        starts, blocks = _tensor_blocks(header, size), [header]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        starts, blocks = [], []
    if not starts:
        starts = [size * index // _BLOCKS_PER_FILE for index in range(_BLOCKS_PER_FILE)]
        blocks = [_read(stream, max(0, size - _TAIL_BYTES), _TAIL_BYTES)]
    yield from blocks
    for start in starts:
        yield _read(stream, start, _BLOCK_BYTES)


def _safetensors_header(stream: BinaryIO, size: int) -> bytes:
    """The first eight bytes, which are the length of the JSON after them, and that JSON."""
    length = int.from_bytes(_read(stream, 0, 8), "little")
    return _read(stream, 0, 8 + length) if length <= min(size, _HEADER_BYTES) else b""


def _tensor_blocks(header: bytes, size: int) -> list[int]:
    """Where the blocks of each tensor start. They lie inside it, because the first rows are often padding.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, RecursionError: the header is none of a file of this size.
    """
    starts = []
    for name, tensor in json.loads(header[8:] or b"{}").items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= size - len(header):
                raise ValueError("a tensor outside of the file")
            parts = _BLOCKS_PER_TENSOR + 1
            starts += [len(header) + begin + (end - begin) * index // parts for index in range(1, parts)]
    return starts


def _read(stream: BinaryIO, start: int, size: int) -> bytes:
    return os.pread(stream.fileno(), size, start)


# -- The tokenizer of a model folder as a few characters, by which processes compare what token ids mean

_CHARACTERS = 16


def tokenizer_digest(folder: Path) -> str:
    """A digest of the text of all token ids; "": the folder has no `tokenizer.json`, or one that cannot be read.

    Rules that turn text into tokens do not count, because any tokens of a text are a prompt that a model can read.
    """
    try:
        text = json.loads((folder / "tokenizer.json").read_bytes())
        tokens = {(str(token), int(token_id)) for token, token_id in _vocabulary(text["model"]["vocab"])}
        tokens |= {(str(each["content"]), int(each["id"])) for each in text.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return ""
    return sha256(json.dumps(sorted(tokens)).encode()).hexdigest()[:_CHARACTERS]


def _vocabulary(vocab: Any) -> list[tuple[Any, Any]]:
    """Tokens with their ids. Unigram models list tokens with scores, in the order of the ids."""
    if isinstance(vocab, dict):
        return list(vocab.items())
    return [(token, token_id) for token_id, (token, _) in enumerate(vocab)]


# -- The errors of the library `tokenizers`, which has no classes for them

_PANIC = "PanicException"


@contextmanager
def as_value_errors() -> Iterator[None]:
    """Around calls of the library: each of its errors is a ValueError.

    It raises plain Exceptions. For a few malformed files its code in Rust panics. That is a BaseException of a class
    that cannot be imported.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(str(error)) from None
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise ValueError(f"tokenizers failed: {error}") from None
