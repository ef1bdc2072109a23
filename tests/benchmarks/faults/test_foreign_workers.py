"""Rounds and KV of workers with other weights: what the harness reports, and what it cannot judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ampd.model_folder import model_digest
from ampd.tiny_model import tiny_model_path
from benchmarks.faults.foreign_workers import forgive_foreign_texts
from benchmarks.faults.load import Ending, RoundResult
from benchmarks.faults.setting import SETTINGS
from benchmarks.faults.weights import foreign_reads, mixed_rounds, other_dtype, other_weights

WEIGHTS = {"a": Path("own"), "b": Path("own"), "f": Path("other"), "g": Path("other")}


def read(worker: str, source: str, tokens: int = 48, message: str = "KV read") -> dict[str, Any]:
    return {"message": message, "session_id": "s", "worker_id": worker, "kv_source": source, "tokens": tokens}


def test_kv_of_other_weights_must_not_be_read() -> None:
    (found,) = foreign_reads([read("a", "b"), read("a", "f"), read("g", "f")], WEIGHTS)
    assert found == "s: a has read 48 tokens of KV from f: their weights differ"


def test_a_read_that_was_refused_moved_no_kv() -> None:
    lines = [read("a", "f", 0), read("a", "f", message="KV read failed"), {"message": "other"}, read("a", "unknown")]
    assert foreign_reads(lines, WEIGHTS) == []


def wrong(*workers: tuple[str | None, str], finish_reason: str | None = "length") -> RoundResult:
    records = [{"prefill_worker": prefill, "decode_worker": decode, "route": "remote"} for prefill, decode in workers]
    return RoundResult("s", 0.0, ending=Ending.WRONG, detail="?", finish_reason=finish_reason, records=records)


@pytest.mark.parametrize(
    ("result", "ending"),
    [
        (wrong(("f", "g"), (None, "g")), Ending.COMPLETED),
        (wrong(("f", "g"), finish_reason=None), Ending.FAILED),
        (wrong(("a", "b")), Ending.WRONG),
        (wrong(("a", "g")), Ending.WRONG),
        (wrong(("a", "b"), ("f", "g")), Ending.WRONG),
        (wrong(), Ending.WRONG),
    ],
)
def test_only_a_round_that_foreign_workers_served_alone_may_have_another_text(
    result: RoundResult, ending: Ending
) -> None:
    forgive_foreign_texts([result], ["f", "g"])
    assert result.ending is ending
    assert bool(result.detail) == (ending is not Ending.COMPLETED)


def test_a_round_of_two_weights_is_reported() -> None:
    assert len(mixed_rounds([wrong(("a", "g")), wrong(("a", "b")), wrong(("f", "g"))], WEIGHTS)) == 1


def test_the_copies_differ_in_what_they_are_for(tmp_path: Path) -> None:
    model = tiny_model_path()
    digests = [
        model_digest(folder)
        for folder in (model, other_weights(model, tmp_path), other_dtype(model, tmp_path, in_config=True))
    ]
    assert len(set(digests)) == 3


def test_another_dtype_by_a_flag_has_the_same_folder(tmp_path: Path) -> None:
    model = tiny_model_path()
    assert model_digest(other_dtype(model, tmp_path, in_config=False)) == model_digest(model)


def test_the_matrix_with_sglang_has_the_faults_that_only_real_engines_show() -> None:
    names = {"kill-detokenizer", "stop-detokenizer", "poison", "other-weights", "other-dtype", "other-tokenizer"}
    names |= {"rolling-restart", "rolling-weights", "deadly-request"}
    assert names <= SETTINGS["sglang"]().faults.keys()
