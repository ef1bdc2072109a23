"""Refusals because of load, as clients of a whole graph see them."""

from itertools import product
from typing import Any

import httpx
import pytest

from ampd.wire import retry_after_s
from tests.harness.graph import HELLO, MODEL, Graph, chat, completion, events, profile, session
from tests.waiting import PATIENCE_S, until

MESSAGES = "/v1/messages"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(HELLO, max_tokens=2, tools=[TOOL]),
    "/v1/completions": completion("hello", max_tokens=2),
    "/v1/responses": {"model": MODEL, "input": "hello", "max_output_tokens": 2},
    MESSAGES: {"model": MODEL, "messages": HELLO, "max_tokens": 2},
}

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def test_new_sessions_get_429_while_a_session_in_progress_goes_on(graph: Graph) -> None:
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.05)
    coordinator = graph.start_coordinator("always-remote", "--max-rounds", "2")
    graph.start_frontend()
    relay = graph.start_status_relay()
    for role in ("prefill", "decode"):
        await graph.new_worker(role, perf)
    await graph.until_answers([coordinator])
    path = "/v1/chat/completions"
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:

        async def ask(name: str) -> httpx.Response:
            return await client.post(path, json=chat(HELLO, max_tokens=2), headers=session(name))

        assert (await ask("running")).status_code == 200

        async def relays() -> bool:
            body = chat(HELLO, max_tokens=2, stream=True)
            answer = await client.post(relay + path, json=body, headers=session("running"))
            return answer.status_code == 200 and "[DONE]" in answer.text

        await until(relays)
        long = chat(HELLO, max_tokens=1000, ignore_eos=True, stream=True)
        async with client.stream("POST", path, json=long, headers=session("long")) as stream:
            chunks = events(stream)  # the stream ends with its last reference
            await anext(chunks)
            for (api, body), is_stream, url in product(REQUESTS.items(), (False, True), (graph.url, relay)):
                asked = {**body, "stream": is_stream}
                refused = await client.post(url + api, json=asked, headers=session("new"))
                assert refused.status_code == 429, refused.text
                error = refused.json()
                message = error["error"]["message"] if api == MESSAGES else error["message"]
                assert "1 rounds are in progress" in message
                seconds = retry_after_s(message)
                assert seconds
                assert refused.headers.get("retry-after") == (str(seconds) if url == relay else None)
                assert (await client.post(url + api, json=asked, headers=session("running"))).status_code == 200

        async def is_served() -> bool:
            return (await ask("new")).status_code == 200

        await until(is_served)  # the client of the long round has left
    await graph.until_views(lambda views: not any(view.queued_prefills for view in views))
