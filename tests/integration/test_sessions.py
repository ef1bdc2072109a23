"""Sessions are listed, shown and ended at a coordinator's system port, without a round."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio

from ampd.call_signatures import operator_token
from ampd.cli.serve.graph import system_environment, system_url
from ampd.keys import session_key
from tests.harness.graph import Graph, chat, profile, session
from tests.harness.ports import free_ports
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

HOST = "127.0.0.1"


class Site:
    """A graph with its client, and `ampd session` against its coordinator."""

    def __init__(self, graph: Graph, client: httpx.AsyncClient, control: str, coordinator: str, secret: Path) -> None:
        self.graph = graph
        self._client = client
        self._control = control
        self.coordinator = coordinator
        self._secret = secret
        self.token = operator_token(secret.read_bytes())

    async def asked(self, operation: str, body: object, **headers: str) -> httpx.Response:
        """The coordinator's answer at its system port."""
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            url = f"{self._control}/engine/sessions/{operation}"
            return await client.post(url, content=json.dumps(body), headers=headers)

    async def round(self, name: str | None, tenant: str = "") -> None:
        headers = (session(name) if name else {}) | ({"x-tenant-id": tenant} if tenant else {})
        body = chat([{"role": "user", "content": f"{name} {tenant} " * 20}], max_tokens=4)
        reply = await self._client.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text

    async def ampd(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, output and errors of `ampd session ...`."""
        named = ("--coordinator-url", self._control, "--graph-secret-file", str(self._secret))
        argv = ("-m", "ampd", "session", *arguments, *named)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=pipe, stderr=pipe)
        out, errors = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), errors.decode()

    async def held(self) -> dict[str, str | None]:
        """Session -> client's id."""
        code, out, errors = await self.ampd("list", "--json")
        assert code == 0, errors
        return {row["session_key"]: row["session_id"] for row in json.loads(out)["sessions"]}

    async def until_held(self, key: str) -> None:
        async def is_held() -> bool:
            return key in await self.held()

        await until(is_held)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(graph: Graph) -> AsyncIterator[Site]:
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.001)
    (port,) = free_ports(1)
    graph.environment |= system_environment(HOST, port)
    secret = graph.folder / "secret"
    secret.write_text("sixteen characters")
    graph.environment["AMPD_GRAPH_SECRET_FILE"] = str(secret)
    coordinator = graph.start_coordinator("always-remote")
    graph.environment |= system_environment(HOST, None)
    graph.start_frontend()
    for role in ("prefill", "decode"):
        await graph.new_worker(role, perf)
    await graph.until_answers([coordinator])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        yield Site(graph, client, system_url(HOST, port), coordinator, secret)


@pytest.mark.long
async def test_a_session_is_listed_shown_and_ended(site: Site) -> None:
    key = session_key("", "agent-7")
    await site.round("agent-7")
    await site.until_held(key)
    assert (await site.held())[key] == "agent-7"
    code, out, errors = await site.ampd("show", "agent-7")
    assert code == 0, errors
    assert key in out
    assert "tokens of KV on" in out
    assert "epoch 1" in out
    code, out, errors = await site.ampd("end", "agent-7")
    assert code == 0, errors
    assert "has ended" in out
    await site.graph.until_views(lambda views: not any(key in view.held_tokens for view in views))

    async def is_forgotten() -> bool:
        return key not in await site.held()

    await until(is_forgotten)
    for operation in ("show", "end"):
        code, _, errors = await site.ampd(operation, "agent-7")
        assert code == 1
        assert "session" in errors
    code, out, errors = await site.ampd("end", "agent-7", "--json")
    assert code == 1, errors
    assert json.loads(out) == {"session_key": key, "was_bound": False, "released_tokens": 0}


async def test_a_session_is_ended_by_its_name_in_the_graph(site: Site) -> None:
    key = session_key("acme", "agent-8")
    await site.round("agent-8", "acme")
    await site.until_held(key)
    code, out, _ = await site.ampd("list")
    assert code == 0
    assert "agent-8 (tenant acme)" in out
    assert (await site.ampd("end", key))[0] == 0
    await site.graph.until_views(lambda views: not any(key in view.held_tokens for view in views))


@pytest.mark.parametrize("tenant", ["", "acme"])
async def test_a_clients_id_may_look_like_a_name_in_the_graph(site: Site, tenant: str) -> None:
    """`uuid4().hex` has 32 hexadecimal digits too."""
    name = uuid4().hex
    key = session_key(tenant, name)
    await site.round(name, tenant)
    await site.until_held(key)
    flags = ["--tenant", tenant] if tenant else []
    code, out, errors = await site.ampd("show", name, *flags)
    assert code == 0, errors
    assert key in out
    code, _, errors = await site.ampd("end", name, *flags)
    assert code == 0, errors
    await site.graph.until_views(lambda views: not any(key in view.held_tokens for view in views))


async def test_the_same_id_of_another_tenant_is_left_alone(site: Site) -> None:
    mine, theirs = session_key("", "twin"), session_key("acme", "twin")
    for tenant, key in (("", mine), ("acme", theirs)):
        await site.round("twin", tenant)
        await site.until_held(key)
    assert (await site.ampd("end", "twin", "--tenant", "acme"))[0] == 0
    await site.graph.until_views(lambda views: not any(theirs in view.held_tokens for view in views))
    assert mine in await site.held()


async def test_an_ended_session_begins_anew(site: Site) -> None:
    key = session_key("", "again")
    await site.round("again")
    await site.until_held(key)
    assert (await site.ampd("end", "again"))[0] == 0
    await site.round("again")
    await site.until_held(key)
    assert "epoch 1" in (await site.ampd("show", "again"))[1]


@pytest.mark.parametrize("body", [{}, {"session_id": 5}, {"session_id": "a", "session_key": "b"}, {"limit": "x"}])
async def test_a_request_that_names_no_session_is_refused(site: Site, body: dict[str, object]) -> None:
    operation = "list" if "limit" in body else "end"
    reply = await site.asked(operation, body | {"token": site.token})
    assert "error" in reply.json()


@pytest.mark.parametrize("token", [{}, {"token": ""}, {"token": 5}, {"token": "0" * 64}])
async def test_a_web_page_neither_sees_nor_ends_sessions(site: Site, token: dict[str, object]) -> None:
    """What a page can send without asking, also under a name of its own that leads to this machine."""
    key = session_key("", "of a page")
    await site.round("of a page")
    await site.until_held(key)
    page = {"Host": "evil.example", "Origin": "http://evil.example", "Content-Type": "text/plain"}
    for operation in ("list", "show", "end"):
        reply = await site.asked(operation, {"session_id": "of a page"} | token, **page)
        assert reply.status_code == 500
        assert "of a page" not in reply.text
        assert site.token not in reply.text
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        assert (await client.get(f"{site._control}/engine/sessions/list", headers=page)).status_code == 500
    assert key in await site.held()


async def test_rounds_without_a_session_are_counted_and_warned_about_once(site: Site) -> None:
    # At once, because a slow machine would need longer for them than the window is.
    await asyncio.gather(*(site.round(None) for _ in range(25)))
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        metrics = (await client.get(f"{site._control}/metrics")).text
    (line,) = [line for line in metrics.splitlines() if line.startswith("ampd_rounds_without_session_total")]
    assert float(line.split()[-1]) >= 25
    assert site.graph.log(site.coordinator).count("rounds came without a session") == 1
    store = await site.graph.store()
    try:

        async def published() -> bool:
            return any(
                entry.view.window.counts.get("unnamed", 0) >= 25 for entry in (await store.overview()).coordinators
            )

        await until(published)
    finally:
        await store.close()
