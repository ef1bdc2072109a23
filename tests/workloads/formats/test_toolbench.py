"""ToolBench: schemas, calls and rewrites of the context."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ampd.errors import UserError

from .lab import NOTES, load, say, shape


def test_toolbench_counts_schemas_calls_and_rewrites(tmp_path: Path) -> None:
    start = [say("system", "you are"), say("user", "do this now")]
    call = say("assistant", None, function_call={"name": "look", "arguments": "up it"})
    result = say("function", "one two three four")
    final = say("assistant", "all done")
    answer = {
        "function": [{"name": "look"}],
        "train_messages": [[*start, call], [*start, call, result, final], [*start, say("user", "again"), final]],
    }
    folder = tmp_path / "answer"
    folder.mkdir()
    (folder / "1.json").write_text(json.dumps({"answer_generation": answer}))
    (folder / "2.json.gz").write_bytes(gzip.compress(json.dumps({"answer_generation": {}}).encode()))
    (session,) = load("toolbench", folder, with_text=True)
    # Prompt: schemas (2 words), system 2, user 3, each + 4, and the answer's header of 3; outputs: words + end.
    assert shape(session) == [
        (2 + 2 + 3 + 12 + 3, 3 + 1, 0.0, None),
        (4 + 4 + 3, 2 + 1, 0.0, None),
        (1 + 4 + 3, 2 + 1, 0.0, 2 + 2 + 3 + 12),
    ]
    assert session.rounds[1].text == "one two three four"
    assert "1 left out, no train_messages" in NOTES[-1]


def test_other_files_of_the_folder_are_left_out(tmp_path: Path) -> None:
    calls = [[say("user", "do this"), say("assistant", "done")]]
    (tmp_path / "1.json").write_text(json.dumps({"answer_generation": {"train_messages": calls}}))
    (tmp_path / "0.json").write_text(json.dumps([{"query": "not an answer"}]))
    assert len(load("toolbench", tmp_path)) == 1
    assert [f"{tmp_path / '0.json'}:1: no row has what toolbench has (answer_generation), left out"] == NOTES
    with pytest.raises(UserError, match=r"0\.json"):
        load("toolbench", tmp_path / "0.json")
