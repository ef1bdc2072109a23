"""The rows of the table of clients: their code is Python, and the engine can play their replies."""

from pathlib import Path

import pytest

from benchmarks.clients.__main__ import Row, table
from benchmarks.clients.cases import CLIENTS, replies
from benchmarks.clients.feature import Client, Feature, session_of
from workers.engines.replies import Replies

ROWS = [(client, feature) for client in CLIENTS for feature in client.features]


@pytest.mark.parametrize(("client", "feature"), ROWS, ids=[f"{client.name} {row.name}" for client, row in ROWS])
def test_the_code_of_a_row_is_python(client: Client, feature: Feature) -> None:
    compile(f"{client.preamble}\n{feature.code}", feature.name, "exec")


def test_each_row_has_a_session_of_its_own_and_replies_that_can_be_played(tmp_path: Path) -> None:
    assert len({session_of(client, feature) for client, feature in ROWS}) == len(ROWS)
    (tmp_path / "replies.jsonl").write_text(replies())
    Replies.read(tmp_path / "replies.jsonl")


def test_a_table_shows_what_fails() -> None:
    rows = [
        Row("a", "loop", "500", error="", is_session=True),
        Row("b", "form", "", error="Error: a | b", is_session=None),
    ]
    assert table(rows).splitlines()[2:] == ["| a | loop | 500 | works | one |", "| b | form |  | Error: a \\| b |  |"]
