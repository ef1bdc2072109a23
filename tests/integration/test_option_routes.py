"""Which options of a request keep its prefill on the decode worker: those that a split would change, and no others."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ampd.keys import session_key
from tests.harness.graph import HELLO, Graph, chat, profile, session
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": {"type": "object"}}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
GUIDED: list[dict[str, Any]] = [{"response_format": FORM}, {**TOOLS, "tool_choice": "required"}]
CALL = {"tool_calls": [{"name": "f", "arguments": {}}]}
"""What the modelled engine answers within these grammars."""


class Site:
    """A graph routed `always-remote`, over one prefill and one decode worker. Its log has the decisions.

    The decision record is not enough, because Dynamo drops it from chats with tools.
    """

    def __init__(self, graph: Graph, client: httpx.AsyncClient, coordinator: str) -> None:
        self._graph = graph
        self._client = client
        self._coordinator = coordinator

    async def route(self, **options: Any) -> tuple[str, str]:
        """Route and reason of a chat."""
        name = json.dumps(options)
        reply = await self._client.post(
            "/v1/chat/completions", json=chat(HELLO, max_tokens=30, **options), headers=session(name)
        )
        assert reply.status_code == 200, reply.text
        line = await until(lambda: self._line(session_key("", name)), 60.0)
        assert line is not None
        return line["route"], line["reason"]

    async def _line(self, key: str) -> dict[str, Any] | None:
        whole, _, _ = self._graph.log(self._coordinator).rpartition("\n")
        lines = (json.loads(line) for line in whole.splitlines() if key in line)
        return next((line for line in lines if line["message"] == "round placed"), None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(graph: Graph) -> AsyncIterator[Site]:
    graph.environment.update(DYN_LOGGING_JSONL="1", DYN_LOG="info", AMPD_LOG_ROUNDS="steps")
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.0, step_s=0.002)
    coordinator = graph.start_coordinator("always-remote")
    graph.start_frontend()
    replies = graph.folder / "replies.jsonl"
    replies.write_text("\n".join(json.dumps({"session": json.dumps(options), **CALL}) for options in GUIDED))
    for role in ("prefill", "decode"):
        graph.start_worker(role, perf, "--lease-s", "60", "--replies", str(replies))
    await graph.until_workers(2)
    await graph.until_answers([coordinator])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        yield Site(graph, client, coordinator)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"n": 2}, "n"),
        ({"presence_penalty": 0.5}, "presence-penalty"),
        ({"frequency_penalty": -0.5}, "frequency-penalty"),
        *((options, "guided-decoding") for options in GUIDED),
    ],
    ids=str,
)
async def test_what_a_split_would_change_is_routed_locally(site: Site, options: dict[str, Any], reason: str) -> None:
    assert await site.route(**options) == ("local", f"cannot-carry-{reason}")


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 3, "temperature": 0.7},
        {"temperature": 0.7, "top_p": 0.9},
        {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        {"stop": ["zzzz"]},
        {"logprobs": True, "top_logprobs": 2},
        {"logit_bias": {"70": 100}},
        {"response_format": {"type": "text"}},
        TOOLS,
        {**TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
        {**TOOLS, "tool_choice": "none"},
        {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "store": False},
    ],
    ids=str,
)
async def test_no_other_option_forces_the_local_route(site: Site, options: dict[str, Any]) -> None:
    assert await site.route(**options) == ("remote", "always-remote")
