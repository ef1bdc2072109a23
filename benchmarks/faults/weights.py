"""Workers with another model folder: copies with other weights or another tokenizer, and what rounds made of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.faults.load import RoundResult

_LENGTH_BYTES = 8


def other_weights(model: Path, folder: Path) -> Path:
    """A copy of a model folder whose tensors differ; made once per `folder`."""
    copy = folder / "other-weights"
    if copy.exists():
        return copy
    unfinished = shutil.copytree(model, folder / "other-weights.part")
    for file in unfinished.glob("*.safetensors"):
        data = file.read_bytes()
        start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        file.write_bytes(data[:start] + data[start:].translate(bytes(value ^ 1 for value in range(256))))
    return unfinished.rename(copy)


def other_tokenizer(model: Path, folder: Path) -> Path:
    """A copy of a model folder in which each plain token has the id of another one; made once per `folder`."""
    copy = folder / "other-tokenizer"
    if copy.exists():
        return copy
    unfinished = shutil.copytree(model, folder / "other-tokenizer.part")
    file = unfinished / "tokenizer.json"
    text = json.loads(file.read_bytes())
    special = {each["content"] for each in text["added_tokens"]}
    vocab = text["model"]["vocab"]
    plain = [token for token in vocab if token not in special]
    text["model"]["vocab"] = vocab | dict(zip(plain, [vocab[token] for token in reversed(plain)], strict=True))
    file.write_text(json.dumps(text))
    return unfinished.rename(copy)


def other_dtype(model: Path, folder: Path, *, in_config: bool) -> Path:
    """A copy of a model folder with the same weights; made once per `folder`.

    Args:
        in_config: whether its configuration says another dtype, as a modelled worker has no flag for it.
    """
    copy = folder / "other-dtype"
    if copy.exists():
        return copy
    unfinished = shutil.copytree(model, folder / "other-dtype.part")
    if in_config:
        file = unfinished / "config.json"
        file.write_text(json.dumps(json.loads(file.read_bytes()) | {"torch_dtype": "bfloat16"}))
    return unfinished.rename(copy)


def rounds_of(results: Iterable[RoundResult], worker_ids: Collection[str]) -> list[str]:
    """Rounds in which one of these workers took part."""
    return [
        f"{result.session_id}: prefilled by {record['prefill_worker']}, decoded by {record['decode_worker']}"
        for result in results
        for record in result.records
        if {record["prefill_worker"], record["decode_worker"]} & set(worker_ids)
    ]


def mixed_rounds(results: Iterable[RoundResult], weights: Mapping[str, Path]) -> list[str]:
    """Rounds that were prefilled and decoded with different weights.

    Args:
        weights: worker id -> model folder. Rounds of other workers are left out.
    """
    known = [
        (result, record)
        for result in results
        for record in result.records
        if record["route"] == "remote" and {record["prefill_worker"], record["decode_worker"]} <= weights.keys()
    ]
    return [
        f"{result.session_id}: prefilled by {record['prefill_worker']}, decoded by {record['decode_worker']}: "
        "their weights differ"
        for result, record in known
        if weights[record["prefill_worker"]] != weights[record["decode_worker"]]
    ]


def foreign_reads(lines: Iterable[Mapping[str, Any]], weights: Mapping[str, Path]) -> list[str]:
    """Reads of KV, by the log of a worker, that have moved KV of other weights.

    Args:
        weights: as of `mixed_rounds`.
    """
    return [
        f"{line.get('session_id')}: {line['worker_id']} has read {line['tokens']} tokens of KV "
        f"from {line['kv_source']}: their weights differ"
        for line in lines
        if line.get("message") == "KV read" and int(line["tokens"])
        if {line["worker_id"], line["kv_source"]} <= weights.keys()
        if weights[line["worker_id"]] != weights[line["kv_source"]]
    ]
