"""The rows of the table of clients: their code can be read, and the engine can play their replies."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ampd.telemetry.metrics import names
from benchmarks.clients.aiperf import CONVERSATIONS, TURNS, compared, conversations
from benchmarks.clients.cases import CLIENTS, replies
from benchmarks.clients.feature import NODE, Client, Feature, session_of
from benchmarks.clients.programs import PROGRAMS
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


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_row_goes_as_the_page_says(tmp_path: Path) -> None:
    """A fault of Dynamo's that is gone fails too. AIPerf's rows compare times, so they are left out."""
    tried = (*(client.name for client in CLIENTS), *(program.client for program in PROGRAMS))
    chosen = [flag for name in tried for flag in ("--client", name)]
    with (tmp_path / "messages").open("w+") as messages:
        command = [sys.executable, "-m", "benchmarks.clients", "--json", *chosen]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=messages, text=True, check=False)
        messages.seek(0)
        said = messages.read()
    assert done.stdout, said[-3000:]
    rows = json.loads(done.stdout)["rows"]
    if not rows:
        pytest.skip("no client is installed: make clients")
    assert [row for row in rows if row["error"]] == []
    assert [row for row in rows if row["is_session"] is False] == []
    if missing := {*chosen[1::2]} - {row["client"] for row in rows}:
        pytest.skip(f"the rows of the other clients work; not installed: {', '.join(sorted(missing))}")


@pytest.mark.parametrize(("client", "feature"), ROWS, ids=[f"{client.name} {row.name}" for client, row in ROWS])
def test_a_fault_of_dynamo_is_described(client: Client, feature: Feature) -> None:  # noqa: ARG001
    page = (Path(__file__).parents[2] / "docs" / "dynamo-known.md").read_text()
    sections = {line[3:].lower().replace(" ", "-") for line in page.splitlines() if line.startswith("## ")}
    assert feature.fault in {"", *sections}


def test_each_row_has_a_session_of_its_own_and_replies_that_can_be_played(tmp_path: Path) -> None:
    assert len({session_of(client, feature) for client, feature in ROWS}) == len(ROWS)
    (tmp_path / "replies.jsonl").write_text(replies())
    Replies.read(tmp_path / "replies.jsonl")


def test_a_table_shows_what_fails() -> None:
    rows = [
        Row("a", "loop", "500", error="", is_session=True),
        Row("b", "form", "", error="Error: a | b", is_session=None),
        Row("c", "times", "", error="", figures="5 and 6 ms"),
        Row("d", "stop", "", error="", fault="answers"),
    ]
    assert table(rows, {"a": "1.2"}).splitlines()[2:] == [
        "| a | 1.2 | loop | 500 | works | known |",
        "| b |  | form |  | Error: a \\| b |  |",
        "| c |  | times |  | works: 5 and 6 ms |  |",
        "| d |  | stop |  | fails, [Dynamo](dynamo-known.md#answers) |  |",
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
