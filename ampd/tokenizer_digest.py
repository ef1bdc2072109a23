"""The tokenizer of a model folder as a few characters, by which processes compare what token ids mean."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

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
