"""Refusals because of load, as clients of a whole graph see them."""

import httpx
import pytest

from ampd.wire import retry_after_s
from tests.harness.graph import HELLO, Graph, chat, completion, events, profile, session
from tests.waiting import PATIENCE_S, until

MESSAGES = "/v1/messages"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def test_new_sessions_get_429_while_a_session_in_progress_goes_on(graph: Graph) -> None:
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.05)
    graph.environment["DYN_ENABLE_ANTHROPIC_API"] = "1"
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
            refused = await ask("new")
            assert refused.status_code == 429, refused.text
            assert "1 rounds are in progress" in refused.json()["message"]
            assert (retry_after_s(refused.json()["message"]) or 0) >= 1
            with_tools = {**chat(HELLO, max_tokens=2), "tools": [TOOL]}
            refused = await client.post(path, json=with_tools, headers=session("new"))
            assert refused.status_code == 429, refused.text
            assert (retry_after_s(refused.json()["message"]) or 0) >= 1
            assert (await ask("running")).status_code == 200
            # Dynamo's frontend passes neither status nor message on here.
            streamed = await client.post(path, json=chat(HELLO, max_tokens=2, stream=True), headers=session("new"))
            assert streamed.status_code == 200
            assert '"code":500' in streamed.text, streamed.text
            # The status relay does.
            for api, body in ((path, chat(HELLO, max_tokens=2)), ("/v1/completions", completion("x", max_tokens=2))):
                relayed = await client.post(relay + api, json={**body, "stream": True}, headers=session("new"))
                assert relayed.status_code == 429, relayed.text
                assert int(relayed.headers["retry-after"]) == retry_after_s(relayed.json()["message"])
            plain = completion("hello", max_tokens=2)
            response = {"model": plain["model"], "input": "hello", "max_output_tokens": 2, "stream": True}
            for api, body, hidden in (("/v1/completions", plain, 500), ("/v1/responses", response, 200)):
                direct = await client.post(api, json=body, headers=session("new"))
                assert direct.status_code == hidden, direct.text
                relayed = await client.post(relay + api, json=body, headers=session("new"))
                assert relayed.status_code == 429, relayed.text
                assert int(relayed.headers["retry-after"]) == retry_after_s(relayed.json()["message"])
            await messages_are_refused_with_a_reason(client, relay)

        async def is_served() -> bool:
            return (await ask("new")).status_code == 200

        await until(is_served)  # the client of the long round has left
    await graph.until_views(lambda views: not any(view.queued_prefills for view in views))


async def messages_are_refused_with_a_reason(client: httpx.AsyncClient, relay: str) -> None:
    """Dynamo's frontend gives `/v1/messages` no reason, and a stream no status. The status relay does."""
    message = {"model": chat(HELLO)["model"], "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    for is_stream in (True, False):
        body = {**message, "stream": is_stream}
        direct = await client.post(MESSAGES, json=body, headers=session("new"))
        assert direct.status_code == (200 if is_stream else 429), direct.text
        assert retry_after_s(direct.text) is None
        relayed = await client.post(relay + MESSAGES, json=body, headers=session("new"))
        assert relayed.status_code == 429, relayed.text
        error = relayed.json()["error"]
        assert error["type"] == "rate_limit_error"
        assert int(relayed.headers["retry-after"]) == retry_after_s(error["message"])
        served = await client.post(relay + MESSAGES, json=body, headers=session("running"))
        assert served.status_code == 200, served.text
        assert ("message_stop" in served.text) == is_stream
