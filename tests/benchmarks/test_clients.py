"""The rows of the table of clients: their code can be read, and the engine can play their replies."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ampd.telemetry.metrics import names
from benchmarks.clients.aiperf import CONVERSATIONS, TURNS, compared, conversations
from benchmarks.clients.cases import CLIENTS, replies
from benchmarks.clients.feature import NODE, Client, Feature, session_of
from benchmarks.clients.table import Row, table
from benchmarks.metrics_agreement import Scraped
from workers.engines.replies import Replies

ROWS = [(client, feature) for client in CLIENTS for feature in client.features]


@pytest.mark.parametrize(("client", "feature"), ROWS, ids=[f"{client.name} {row.name}" for client, row in ROWS])
def test_the_code_of_a_row_can_be_read(client: Client, feature: Feature) -> None:
    code = f"{client.preamble}\n{feature.code}"
    if client.language != NODE:
        compile(code, feature.name, "exec")
    elif node := shutil.which("node"):
        subprocess.run([node, "--check", "--input-type=module", "-"], input=code, text=True, check=True)


def test_each_row_has_a_session_of_its_own_and_replies_that_can_be_played(tmp_path: Path) -> None:
    assert len({session_of(client, feature) for client, feature in ROWS}) == len(ROWS)
    (tmp_path / "replies.jsonl").write_text(replies())
    Replies.read(tmp_path / "replies.jsonl")


def test_a_table_shows_what_fails() -> None:
    rows = [
        Row("a", "loop", "500", error="", is_session=True),
        Row("b", "form", "", error="Error: a | b", is_session=None),
        Row("c", "times", "", error="", figures="5 and 6 ms"),
    ]
    assert table(rows).splitlines()[2:] == [
        "| a | loop | 500 | works | one |",
        "| b | form |  | Error: a \\| b |  |",
        "| c | times |  | works: 5 and 6 ms |  |",
    ]


def test_the_conversations_of_aiperf_share_no_prompt() -> None:
    lines = conversations().splitlines()
    assert (len(lines), lines[0].count('"text"')) == (CONVERSATIONS, TURNS)
    assert len(set(lines)) == CONVERSATIONS


@pytest.mark.parametrize(("ttft_s", "works"), [(0.2, True), (0.1, False)])
def test_figures_that_differ_are_an_error(ttft_s: float, works: bool) -> None:
    result = {"time_to_first_token": {"avg": 210.0}, "inter_token_latency": {"avg": 20.5}}
    since = Scraped(
        {
            (f"{metric.name}_{suffix}", ()): value
            for metric, mean in ((names.TTFT, ttft_s), (names.ITL, 0.02))
            for suffix, value in (("sum", 60 * mean), ("count", 60.0))
        }
    )
    row = compared(result, since)
    assert bool(row.error) is not works
    assert f"TTFT 210.0 and {ttft_s * 1e3:.1f} ms, ITL 20.5 and 20.0 ms" in row.state
