"""What names a session, ends it and names its tenant, through the relay and Dynamo's frontend.

Dynamo reads headers on every route in the same way, and tests of the relay have a table of the names that it makes. So
some are tried on one route, and each route with a header and a key of the body.
"""

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ampd.cli.serve.graph import system_environment, system_url
from ampd.keys import session_key
from ampd.state.redis_store import StateStore
from ampd.telemetry.metrics import names
from tests.harness.graph import HELLO, MODEL, Graph, chat, profile, record
from tests.harness.ports import free_ports
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

HOST = "127.0.0.1"
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": MODEL, "messages": HELLO, "max_tokens": 2},
    "completions": {"model": MODEL, "prompt": "hello", "max_tokens": 2},
    "responses": {"model": MODEL, "input": HELLO, "max_output_tokens": 2},
    "messages": {"model": MODEL, "messages": HELLO, "max_tokens": 2},
}


class Site:
    """A graph with its client, its shared state, and its coordinator's metrics."""

    def __init__(self, client: httpx.AsyncClient, store: StateStore, control: str) -> None:
        self._client = client
        self._store = store
        self._control = control

    async def send(self, path: str, headers: dict[str, str], more: dict[str, Any] | None = None) -> dict[str, Any]:
        utf_8 = [(name.encode(), value.encode()) for name, value in headers.items()]
        reply = await self._client.post(f"/v1/{path}", json={**BODIES[path], **(more or {})}, headers=utf_8)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    async def is_bound(self, name: str, tenant: str = "") -> bool:
        return await self._store.binding(session_key(tenant, name)) is not None

    async def counted(self, metric: names.Metric) -> float:
        """The sum of a counter of the coordinator."""
        text = (await self._client.get(f"{self._control}/metrics")).text
        return sum(float(value) for value in re.findall(rf"^{metric.name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    async def unnamed(self, path: str, headers: dict[str, str], more: dict[str, Any] | None = None) -> float:
        """How many of the rounds of one request came without a session."""
        rounds, before = await self.counted(names.ROUNDS), await self.counted(names.ROUNDS_UNNAMED)
        await self.send(path, headers, more)

        async def is_counted() -> bool:
            return await self.counted(names.ROUNDS) > rounds

        await until(is_counted, poll_s=0.02)
        return await self.counted(names.ROUNDS_UNNAMED) - before


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(graph: Graph) -> AsyncIterator[Site]:
    perf = profile(graph.folder, prefill_s=0.001, long_prefill_s=0.01, step_s=0.001)
    (port,) = free_ports(1)
    graph.environment |= system_environment(HOST, port)
    coordinator = graph.start_coordinator("always-local", "--max-wait", "0")
    graph.environment |= system_environment(HOST, None)
    graph.start_frontend("--session-names", "x-my-run", status_relay=True)
    await graph.new_worker("decode", perf)
    await graph.until_answers([coordinator])
    store = await graph.store()
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        yield Site(client, store, system_url(HOST, port))
    await store.close()


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"x-dynamo-session-id": "dynamo"}, "dynamo"),
        ({"session-id": "codex"}, "codex"),
        ({"x-litellm-session-id": "litellm"}, "litellm"),
        ({"x-my-run": "own"}, "own"),
        ({"session_id": "old"}, "old"),
        ({"x-session-affinity": "second", "session-id": "first"}, "first"),
        ({"x-session-affinity": "second", "x-session-id": "first"}, "first"),
        ({"x-session-affinity": "second", "x-claude-code-session-id": "first"}, "first"),
        ({"x-session-id": "second", "session-id": "first"}, "first"),
        ({"x-session-id": "second", "thread-id": "first"}, "first"),
        ({"session-id": "second", "x-my-run": "first"}, "first"),
        ({"x-claude-code-session-id": "second", "x-dynamo-session-id": "first"}, "first"),
    ],
)
async def test_headers_that_name_a_session(site: Site, headers: dict[str, str], name: str) -> None:
    """docs/coordinator.md has this list, in the order in which they count."""
    await check_named(site, "chat/completions", headers, name)


@pytest.mark.parametrize("path", BODIES)
async def test_every_route_reads_headers_and_bodies_of_any_characters(site: Site, path: str) -> None:
    await check_named(site, path, {"x-session-affinity": "second", "session-id": "first"}, "first")
    name = f"{path} \u4f1a\u8bdd"
    assert await site.unnamed(path, {}, {"metadata": {"session_id": name}}) == 0
    assert await site.is_bound(name)
    await site.send(path, {"x-dynamo-session-id": f"{name} \u00e4"})
    assert await site.is_bound(f"{name} \u00e4")


async def check_named(site: Site, path: str, headers: dict[str, str], name: str) -> None:
    own = f"{path} {'+'.join(headers)} "
    assert await site.unnamed(path, {header: own + value for header, value in headers.items()}) == 0
    assert [value for value in headers.values() if await site.is_bound(own + value)] == [name]


@pytest.mark.parametrize(
    ("path", "of_session", "of_part"),
    [
        ("responses", "session-id", "thread-id"),
        ("messages", "x-claude-code-session-id", "x-claude-code-agent-id"),
    ],
)
async def test_each_thread_and_agent_of_a_session_is_a_session_of_its_own(
    site: Site, path: str, of_session: str, of_part: str
) -> None:
    """Sessions with threads or agents of the same names share nothing. Codex and Claude Code use these routes."""
    trees, parts = [f"{name} {of_session} of {path}" for name in ("tree", "other tree")], ("root", "scout")
    for tree in trees:
        for part in parts:
            assert not await site.is_bound(f"{tree}/{part}")
            assert await site.unnamed(path, {of_session: tree, of_part: part}) == 0
            assert await site.is_bound(f"{tree}/{part}")
    assert not [name for name in (*trees, *parts) if await site.is_bound(name)]
    await site.send(path, {of_session: trees[0], of_part: "scout", "x-dynamo-session-final": "true"})

    async def has_ended() -> bool:
        return not await site.is_bound(f"{trees[0]}/scout")

    await until(has_ended)
    for name in (f"{trees[0]}/root", f"{trees[1]}/scout"):
        assert await site.is_bound(name)


async def test_threads_that_take_turns_keep_their_contexts(site: Site) -> None:
    contexts: dict[str, list[dict[str, str]]] = {"root": [], "scout": []}
    for _ in range(3):
        for thread, messages in contexts.items():
            before = sum(len(message["content"].split()) for message in messages)
            messages.append({"role": "user", "content": " ".join(f"{thread}{n}" for n in range(100))})
            wanted = chat(messages, max_tokens=2)
            answer = await site.send("chat/completions", {"session-id": "turns", "thread-id": thread}, wanted)
            assert record(answer)["session_id"] == f"turns/{thread}"
            assert record(answer)["hist_tokens"] >= before
            assert (record(answer)["hist_tokens"] > 0) == bool(before)
            messages.append({"role": "assistant", "content": "ok"})


async def test_a_line_of_billing_that_changes_hides_no_prefix(site: Site) -> None:
    system = " ".join(f"rule{number}" for number in range(200))
    cached = []
    for number in range(2):
        line = f"x-anthropic-billing-header: cc_version=9.9.{number}; cc_entrypoint=cli; cch=0{number}234;"
        more = {"system": [{"type": "text", "text": text} for text in (line, system)]}
        answer = await site.send("messages", {"x-claude-code-session-id": "billed"}, more)
        cached.append(answer["usage"].get("cache_read_input_tokens", 0))
    assert cached[0] == 0
    assert cached[1] > len(system.split()), cached


@pytest.mark.parametrize("headers", [{"x-dynamo-session-id": "contexts"}, {}], ids=["named", "unnamed"])
async def test_each_context_is_found_again(site: Site, headers: dict[str, str]) -> None:
    """Of sub-agents and forks that have no name of their own, and of agents that have none at all."""
    tag = headers.get("x-dynamo-session-id", "unnamed")
    contexts: dict[str, list[dict[str, str]]] = {"root": [], "scout": []}
    for number in range(3):
        if number == 2:
            contexts["fork"] = [*contexts["root"]]
        for thread, messages in contexts.items():
            before = sum(len(message["content"].split()) for message in messages)
            words = " ".join(f"{tag}{thread}{number}-{at}" for at in range(100))
            messages.append({"role": "user", "content": words})
            answer = await site.send("chat/completions", headers, chat(messages, max_tokens=2))
            assert record(answer)["hist_tokens"] >= before
            assert (record(answer)["hist_tokens"] > 0) == bool(before)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})


async def test_a_prefix_that_breaks_in_every_round_is_shown(site: Site) -> None:
    for number in range(5):
        words = f"it is {number} o'clock " + " ".join(f"rule{at}" for at in range(200))
        answer = await site.send(
            "chat/completions",
            {"x-dynamo-session-id": "clock"},
            chat([{"role": "user", "content": words}], max_tokens=2),
        )
        assert (record(answer)["breaks_at_tokens"] is not None) == bool(number)
    assert await site.counted(names.SESSIONS_BREAKING) >= 1


NAMES_NO_SESSION = (
    "x-claude-code-agent-id",
    "x-claude-code-parent-agent-id",
    "x-dynamo-parent-session-id",
    "x-parent-session-id",
    "x-correlation-id",
    "x-request-id",
)


@pytest.mark.parametrize("path", BODIES)
async def test_what_names_no_session(site: Site, path: str) -> None:
    """docs/coordinator.md names these too. One request has all of them, each with a value of its own."""
    headers = {name: f"other {name}" for name in NAMES_NO_SESSION}
    metadata = {"user_id": "other user_id"}
    unnamed = await site.unnamed(path, headers, {"user": "other user", "metadata": metadata})
    values = [*headers.values(), "other user", *metadata.values()]
    assert [value for value in values if await site.is_bound(value)] == []
    assert unnamed == 1


@pytest.mark.parametrize("path", BODIES)
async def test_the_last_round_and_the_tenant_are_named_by_headers_on_every_route(site: Site, path: str) -> None:
    headers = {"x-dynamo-session-id": f"last of {path}", "x-tenant-id": "acme"}
    await site.send(path, headers)
    assert await site.is_bound(f"last of {path}", "acme")
    assert not await site.is_bound(f"last of {path}")
    await site.send(path, {**headers, "x-dynamo-session-final": "true"})

    async def has_ended() -> bool:
        return not await site.is_bound(f"last of {path}", "acme")

    await until(has_ended)
