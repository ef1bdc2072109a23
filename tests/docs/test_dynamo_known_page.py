"""Each request of the page on Dynamo's faults is sent, so that the page says what is true of the installed version."""

import json
import re
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.harness.graph import Graph, profile, session
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PAGE = (Path(__file__).parents[2] / "docs" / "dynamo-known.md").read_text()
REPLIES = re.findall(r"```replies\n(.*?)```", PAGE, re.DOTALL)
CASES = re.findall(r"```request\nPOST (\S+)(?: as ([\w ]+))?\n(.*?)\n```\n```answer\n(\d+) (.*?)\n```", PAGE, re.DOTALL)

ATTEMPTS = 10


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(graph: Graph) -> AsyncIterator[httpx.AsyncClient]:
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.001)
    replies = graph.folder / "replies.jsonl"
    replies.write_text("".join(REPLIES))
    # Three sessions, because the page's requests without a tenant have two, and one without a name at a time.
    coordinator = graph.start_coordinator("always-remote", "--max-sessions-per-tenant", "3")
    graph.start_frontend()
    for role in ("prefill", "decode"):
        await graph.new_worker(role, perf, "--replies", str(replies))
    await graph.until_answers([coordinator])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]} {case[2][:60]}" for case in CASES])
async def test_the_page_is_true(client: httpx.AsyncClient, case: tuple[str, str, str, str, str]) -> None:
    path, names, body, status, text = case
    # Tokens that wait for the frontend come in one chunk, as on a busy machine. Some faults do not show then.
    for _ in range(ATTEMPTS):
        for name in names.split() or [""]:
            headers = session(name) if name else {}
            answer = await client.post(path, json=json.loads(body), headers=headers)
        assert "retry-after" not in answer.headers
        assert str(answer.status_code) == status, answer.text
        if text in answer.text:
            break
    assert text in answer.text


async def test_the_page_is_about_the_installed_version() -> None:
    assert PAGE.startswith(f"# Known with Dynamo {version('ai-dynamo')}\n")
    assert len(CASES) == PAGE.count("```request")
