"""Rounds through a whole graph: frontend, coordinator, workers. Everything but the engine is real."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from ampd.keys import session_key
from ampd.types import Role
from tests.harness.graph import HELLO, MODEL, Graph, chat, completion, events, profile, record, session
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

WORDS = "The weather in Paris is mild today, with light wind from the west and a little rain expected. "
LIMIT_TOKENS = 2048


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def empty(graph: Graph) -> AsyncIterator[dict[str, Any]]:
    """The graph before its first worker, with the answer of that time."""
    coordinator = graph.start_coordinator("always-remote")
    graph.start_frontend()
    await graph.until_answers([coordinator], (503,))
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        answers = [
            await client.post(f"/v1/{path}", json={**body, "stream": stream})
            for path, body in (("chat/completions", chat(HELLO)), ("completions", completion("hello")))
            for stream in (False, True)
        ]
    yield {"coordinator": coordinator, "statuses": [answer.status_code for answer in answers]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def remote(graph: Graph, empty: dict[str, Any]) -> AsyncIterator[httpx.AsyncClient]:
    """Routed `always-remote`, over one prefill and two decode workers.

    No worker is lost here. A long lease keeps the sessions where they are, however busy the machine is.
    """
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.0, step_s=0.002)
    for role in ("prefill", "decode", "decode"):
        graph.start_worker(role, perf, "--max-context-tokens", str(LIMIT_TOKENS), "--lease-s", "60")
    await graph.until_workers(3)
    await graph.until_answers([empty["coordinator"]])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        yield client


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    reply = await client.post(f"/v1/{path}", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def rounds(client: httpx.AsyncClient, name: str, number: int) -> list[dict[str, Any]]:
    """A session of chat rounds that grows like an agent's."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": WORDS * 3}]
    answers = []
    for turn in range(number):
        answer = await post(client, "chat/completions", chat(messages, max_tokens=20), **session(name))
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": f"Result {turn}: {WORDS}"})
    return answers


async def test_without_a_decode_worker_the_answer_is_503(empty: dict[str, Any]) -> None:
    assert empty["statuses"] == [503] * 4


async def test_a_session_stays_at_one_decode_worker_and_its_history_is_read_not_computed(
    remote: httpx.AsyncClient,
) -> None:
    answers = await rounds(remote, "affinity", 4)
    records = [record(answer) for answer in answers]
    assert {decision["route"] for decision in records} == {"remote"}
    assert len({decision["decode_worker"] for decision in records}) == 1
    assert records[0]["hist_tokens"] == 0
    assert all(decision["prefill_worker"] not in (None, decision["decode_worker"]) for decision in records)
    for before, after, answer in zip(records, records[1:], answers[1:], strict=False):
        assert after["hist_tokens"] > before["hist_tokens"]
        assert after["hist_tokens"] + after["incr_tokens"] == answer["usage"]["prompt_tokens"]
        assert after["cached_tokens"] >= after["hist_tokens"] // 16 * 16
        assert after["kv_read_tokens_increment"] > 0
        assert after["ttft_s"] > 0
    assert sum(decision["kv_read_tokens_history"] for decision in records) > 0


async def test_cached_tokens_never_count_what_another_tenant_sent(remote: httpx.AsyncClient) -> None:
    async def cached(header: str | None, salt: str | None) -> int:
        body = completion(f"Of tenants. {WORDS * 5}", max_tokens=4)
        body["nvext"] |= {"cache_salt": salt} if salt else {}
        answer = await post(remote, "completions", body, **({"x-tenant-id": header} if header else {}))
        assert record(answer)["route"] == "remote"
        tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert tokens == record(answer)["cached_tokens"]
        return tokens

    assert await cached("alice", None) == await cached("bob", None) == await cached(None, None) == 0
    hits = await cached("alice", None)
    assert hits > 0
    assert await cached(None, "alice") == await cached(None, None) == hits
    assert await cached("mallory", "alice") == 0
    # The header hides the salt, so that two salts of one tenant share KV (docs/security.md).
    assert await cached("alice", "a user of alice's") == hits


async def test_a_prompt_that_two_sessions_shared_is_known_for_new_ones(remote: httpx.AsyncClient) -> None:
    system = [64 + position * 7 % 181 for position in range(256)]
    numbers = count()

    async def begin(**tenant: str) -> dict[str, Any]:
        """The first round of another agent."""
        number = next(numbers)
        prompt = [*system, *[64 + number % 180] * 40]
        return record(
            await post(remote, "completions", completion(prompt, max_tokens=4), **session(f"kin {number}"), **tenant)
        )

    async def known() -> dict[str, Any] | None:
        made = await begin()
        return made if made["shared_tokens"] else None

    assert (await begin())["shared_tokens"] == 0
    # The second session makes the prefix a shared one. Then its worker publishes it, and the coordinator learns of it.
    made = await until(known, timeout_s=90, poll_s=0.1)
    assert made is not None
    assert (made["shared_tokens"], made["hist_tokens"], made["incr_tokens"]) == (256, 256, 40)
    assert made["cached_tokens"] >= 256
    assert (await begin(**{"x-tenant-id": "stranger"}))["shared_tokens"] == 0


@pytest.mark.parametrize("is_chat", [True, False])
async def test_an_announcement_is_a_request_without_output(remote: httpx.AsyncClient, is_chat: bool) -> None:
    messages = [{"role": "user", "content": WORDS * 4}]
    path, body = ("chat/completions", chat(messages)) if is_chat else ("completions", completion(WORDS * 4))
    name = f"announced {path}"
    await post(remote, path, {**body, "max_tokens": 4}, **session(name))
    body["nvext"]["annotations"] = ["announce"]
    announced = await post(remote, path, body, **session(name))
    assert (record(announced)["route"], record(announced)["reason"]) == ("local", "cannot-carry-max-tokens")
    assert announced["usage"]["completion_tokens"] == 0
    assert announced["choices"][0]["finish_reason"] == "length"


async def test_usage_counts_the_client_s_prompt_and_both_parts_of_the_output(remote: httpx.AsyncClient) -> None:
    body = completion("hello there, how are you", max_tokens=7)
    answer = await post(remote, "completions", body)
    local = await post(remote, "completions", {**body, "presence_penalty": 0.5})
    assert record(answer)["route"] == "remote"
    assert record(local)["reason"] == "cannot-carry-presence-penalty"
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [answer["usage"][name] for name in counts] == [local["usage"][name] for name in counts]
    assert answer["usage"]["completion_tokens"] == 7


async def test_log_probabilities_cover_every_token_of_a_split_round(remote: httpx.AsyncClient) -> None:
    body = completion("hello there", max_tokens=5, logprobs=2)
    split = await post(remote, "completions", body)
    whole = await post(remote, "completions", {**body, "frequency_penalty": 0.1})
    assert (record(split)["route"], record(whole)["route"]) == ("remote", "local")
    assert len(split["choices"][0]["logprobs"]["token_logprobs"]) == 5
    assert split["choices"][0] == whole["choices"][0]


async def test_a_stop_string_across_the_parts_of_a_round_ends_it(remote: httpx.AsyncClient) -> None:
    text = (await post(remote, "completions", completion("hello there", max_tokens=6)))["choices"][0]["text"]
    body = completion("hello there", max_tokens=6, stop=[text[1:6]])
    split = await post(remote, "completions", body)
    whole = await post(remote, "completions", {**body, "frequency_penalty": 0.1})
    assert (record(split)["route"], record(whole)["route"]) == ("remote", "local")
    assert split["choices"][0] == whole["choices"][0]
    assert split["choices"][0]["finish_reason"] == "stop"
    assert len(split["choices"][0]["text"]) < len(text)


@pytest.mark.parametrize("max_tokens", [1, 40])
async def test_a_round_that_ends_with_its_first_token_leaves_its_kv_at_the_decode_worker(
    remote: httpx.AsyncClient, graph: Graph, max_tokens: int
) -> None:
    name, reply = f"one-token-{max_tokens}", "" if max_tokens > 1 else "x"
    messages = [{"role": "user", "content": f"{WORDS * 2} PLAY[{reply}]ENDPLAY"}]
    answer = await post(remote, "chat/completions", chat(messages, max_tokens=max_tokens), **session(name))
    assert answer["choices"][0]["finish_reason"] == ("length" if max_tokens == 1 else "stop")
    assert answer["usage"]["completion_tokens"] == 1
    decode, prompt = record(answer)["decode_worker"], answer["usage"]["prompt_tokens"]
    # Pages that it shares with other sessions are held at once, the rest when it has been read.
    await graph.until_views(
        lambda views: any(
            view.worker_id == decode and view.held_tokens.get(session_key("", name)) == prompt // 16 * 16
            for view in views
        )
    )


async def test_streams_end_with_usage_and_record(remote: httpx.AsyncClient) -> None:
    body = completion("hello there", max_tokens=6, stream=True, stream_options={"include_usage": True})
    async with remote.stream("POST", "/v1/completions", json=body) as response:
        seen = [event async for event in events(response)]
    text = "".join(choice["text"] for event in seen for choice in event["choices"])
    whole = await post(remote, "completions", completion("hello there", max_tokens=6))
    assert text == whole["choices"][0]["text"]
    records = [record(event) for event in seen if event.get("nvext")]
    assert records[-1]["kv_read_tokens_increment"] == 0
    assert records[-1]["prefill_worker"]
    assert [event["usage"]["completion_tokens"] for event in seen if event.get("usage")] == [6]


async def test_clients_that_do_not_ask_get_no_record(remote: httpx.AsyncClient) -> None:
    answer = await post(remote, "completions", {"model": MODEL, "prompt": "hello", "max_tokens": 3})
    assert "nvext" not in answer or "engine_data" not in answer["nvext"]


async def test_targets_of_a_request_are_milliseconds(remote: httpx.AsyncClient) -> None:
    body = chat(HELLO, max_tokens=2)
    body["nvext"]["router"] = {"ttft_target": -5}
    reply = await remote.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert "milliseconds" in reply.text
    # For completions the frontend passes annotations on, and not `router`.
    statuses = []
    for value in ("5", "-5"):
        body = completion("hello", max_tokens=2)
        body["nvext"]["annotations"] = [f"itl_target:{value}"]
        statuses.append((await remote.post("/v1/completions", json=body)).status_code)
    assert statuses == [200, 400]


async def test_rewritten_context_keeps_its_valid_prefix(remote: httpx.AsyncClient) -> None:
    base = [5 + position % 300 for position in range(640)]
    await post(remote, "completions", completion(base, max_tokens=4), **session("rewriter"))
    changed = base[:320] + [400 + position % 300 for position in range(200)]
    answer = await post(remote, "completions", completion(changed, max_tokens=4), **session("rewriter"))
    fresh = await post(remote, "completions", completion(changed, max_tokens=4))
    assert record(answer)["rewritten"]
    assert record(answer)["hist_tokens"] == 320
    assert record(answer)["cached_tokens"] == 320
    assert answer["choices"][0]["text"] == fresh["choices"][0]["text"]


async def test_the_final_round_releases_the_session_everywhere(remote: httpx.AsyncClient, graph: Graph) -> None:
    prompt = [5 + position % 300 for position in range(300)]
    await post(remote, "completions", completion(prompt, max_tokens=4), **session("last"))
    assert await graph.until_views(lambda views: any(session_key("", "last") in view.held_tokens for view in views))
    await post(remote, "completions", completion([*prompt, 9], max_tokens=4), **session("last", final=True))
    await graph.until_views(lambda views: not any(session_key("", "last") in view.held_tokens for view in views))
    store = await graph.store()
    assert await store.binding(session_key("", "last")) is None
    await store.close()


async def test_a_tenant_cannot_end_the_session_of_another(remote: httpx.AsyncClient, graph: Graph) -> None:
    prompt = [5 + position % 300 for position in range(300)]
    alice, bob = ({**session("shared"), "x-tenant-id": name} for name in ("alice", "bob"))
    held = session_key("alice", "shared")
    answer = await post(remote, "completions", completion(prompt, max_tokens=4), **alice)
    assert record(answer)["session_key"] == held
    assert await graph.until_views(lambda views: any(held in view.held_tokens for view in views))
    for final in ("true", "false"):
        await post(remote, "completions", completion(prompt, max_tokens=4), **{**bob, "x-dynamo-session-final": final})
    foreign = session_key("bob", "shared")
    assert await graph.until_views(lambda views: any(foreign in view.held_tokens for view in views))
    store = await graph.store()
    assert await store.binding(held) is not None
    assert any(held in view.held_tokens for view in await store.snapshot())
    await store.close()


async def test_a_round_without_a_session_leaves_nothing(remote: httpx.AsyncClient, graph: Graph) -> None:
    answer = await post(remote, "completions", completion(WORDS * 4, max_tokens=4))
    name = record(answer)["session_id"]
    await graph.until_views(lambda views: not any(name in view.held_tokens for view in views))
    store = await graph.store()
    assert await store.binding(name) is None
    await store.close()


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_reaches_the_openai_client(graph: Graph, stream: bool) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"How is the weather in Paris? PLAY[{CALL}]ENDPLAY"}],
        "tools": [TOOL],
        "max_tokens": 200,
        "extra_headers": session(f"tools-{stream}"),
    }
    async with openai.AsyncOpenAI(base_url=f"{graph.url}/v1", api_key="none") as client:
        if stream:
            name, arguments, reason = "", "", None
            async for chunk in await client.chat.completions.create(stream=True, **options):
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
                    for call in choice.delta.tool_calls or []:
                        name += call.function.name or ""
                        arguments += call.function.arguments or ""
        else:
            answer = await client.chat.completions.create(**options)
            reason, call = answer.choices[0].finish_reason, answer.choices[0].message.tool_calls[0]
            name, arguments = call.function.name, call.function.arguments
    assert (name, json.loads(arguments), reason) == ("get_weather", {"city": "Paris"}, "tool_calls")
    held = session_key("", f"tools-{stream}")
    # Dynamo's tool parser drops `nvext`, so the route is read from who holds the prompt.
    both = {Role.PREFILL, Role.DECODE}
    await graph.until_views(lambda views: {view.role for view in views if held in view.held_tokens} == both)


async def test_all_routes_give_the_same_text(remote: httpx.AsyncClient, graph: Graph, empty: dict[str, Any]) -> None:
    texts, routes = {}, {}
    for routing in ("always-remote", "always-local", "ampd"):
        if routing != "always-remote":
            await graph.end(empty["coordinator"])
            empty["coordinator"] = graph.start_coordinator(routing)
            await graph.until_answers([empty["coordinator"]])
        answers = await rounds(remote, f"equal-{routing}", 6)
        texts[routing] = [answer["choices"][0]["message"]["content"] for answer in answers]
        routes[routing] = [record(answer)["route"] for answer in answers]
    assert texts["always-local"] == texts["always-remote"] == texts["ampd"]
    assert set(routes["always-local"]) == {"local"}
    assert set(routes["always-remote"]) == {"remote"}


async def test_several_coordinators_agree_on_one_decode_worker_a_session(
    remote: httpx.AsyncClient, graph: Graph, empty: dict[str, Any]
) -> None:
    coordinators = [empty["coordinator"], *(graph.start_coordinator("ampd") for _ in range(2))]
    await graph.until_registered(3)
    await graph.until_answers(coordinators)
    bound: dict[str, set[str]] = {}
    # Sessions that are bound between two views of the workers may all go to the emptier one. So the next ones wait for
    # views that hold them.
    while len(set().union(*bound.values())) < 2:
        assert len(bound) < 250, "all sessions are bound to one worker"
        bodies = [
            (f"shared-{number}", completion([5 + number] * 40, max_tokens=3))
            for number in range(len(bound), len(bound) + 50)
        ]
        asked = [post(remote, "completions", body, **session(name)) for name, body in bodies for _ in range(3)]
        answers = [record(answer) for answer in await asyncio.gather(*asked)]
        bound |= {
            name: {decision["decode_worker"] for decision in answers if decision["session_id"] == name}
            for name, _ in bodies
        }
        assert all(len(workers) == 1 for workers in bound.values()), bound
        keys = {session_key("", name) for name in bound}
        await graph.until_views(lambda views, keys=keys: keys <= {key for view in views for key in view.held_tokens})
    # Each replica goes on with a session that others served: what is known of it is the decode worker's word.
    again = [
        record(await post(remote, "completions", completion([5] * 40 + [7] * 40, max_tokens=3), **session("shared-0")))
        for _ in range(3)
    ]
    assert {decision["decode_worker"] for decision in again} == bound["shared-0"]
    assert all(decision["hist_tokens"] >= 32 for decision in again)
