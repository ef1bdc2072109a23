"""Checks the model folder that every process reads."""

from __future__ import annotations

from pathlib import Path

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
