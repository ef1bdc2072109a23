"""What a process that is no member of the graph can do with a way to the workers' ports: nothing, if there is a secret.

The workers and the coordinator share a secret; the driver, which can call every endpoint, does not have it.
"""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from dynamo.runtime import Context

from ampd.call_signatures import SIGNATURE, Signer
from ampd.keys import session_key
from ampd.types import Role, WorkerView
from ampd.wire import GENERATE_ENDPOINT, KV_ENDPOINT, METADATA_PREFIX, PREFILL_ENDPOINT
from tests.harness.driver import Driver, driving, message
from tests.harness.graph import Graph, completion, record, session
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SECRET = "a secret of this graph"
VICTIM = session_key("", "victim")
MATCH = {"op": "match", "keys": []}


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "graph-secret"
    path.write_text(f"{SECRET}\n")
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stranger(graph: Graph, secret_file: Path) -> AsyncIterator[Driver]:
    """A driver without the secret, in a graph of two workers, a coordinator and a frontend."""
    async with driving(graph) as driver:
        flags = ("--graph-secret-file", str(secret_file))
        await driver.start(Role.PREFILL, *flags)
        await driver.start(Role.DECODE, *flags)
        coordinator = graph.start_coordinator("always-remote", "--perf", str(driver.perf), *flags)
        graph.start_frontend()
        await graph.until_answers([coordinator])
        yield driver


async def worker_of(driver: Driver, role: Role) -> str:
    (view,) = [view for view in await driver.store.snapshot() if view.role is role]
    return view.worker_id


def held(views: list[WorkerView], worker_id: str) -> int:
    """Tokens of the victim that a worker publishes."""
    return next(view.held_tokens.get(VICTIM, 0) for view in views if view.worker_id == worker_id)


async def post(graph: Graph, prompt: list[int], name: str, **headers: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        reply = await client.post(
            "/v1/completions", json=completion(prompt, max_tokens=4), headers={**session(name), **headers}
        )
    assert reply.status_code == 200, reply.text
    return record(reply.json())


def prompt(length: int) -> list[int]:
    return [random.Random(length).randrange(10, 600) for _ in range(length)]


async def test_members_call_each_other(graph: Graph, stranger: Driver) -> None:
    """A remote round calls the prefill worker, which reads the history, and the decode worker, which reads the rest."""
    assert stranger.clients
    first = await post(graph, prompt(400), "members")
    second = await post(graph, prompt(400) + prompt(300), "members")
    assert (first["route"], second["route"]) == ("remote", "remote")
    assert second["kv_read_tokens_history"] + second["kv_read_tokens_increment"] > 0
    assert second["retries"] == 0


@pytest.mark.parametrize(
    ("endpoint", "request_of"),
    [
        (PREFILL_ENDPOINT, message(prompt(20))),
        (GENERATE_ENDPOINT, message(prompt(20), max_tokens=2)),
        (KV_ENDPOINT, MATCH),
        (KV_ENDPOINT, {"op": "lease", "keys": [], "ttl_s": 1e18}),
        (KV_ENDPOINT, {"op": "unlease", "lease_id": "1"}),
        (KV_ENDPOINT, {"op": "release_session", "session_id": VICTIM}),
        (KV_ENDPOINT, "nonsense"),
    ],
)
async def test_a_stranger_calls_nothing(graph: Graph, stranger: Driver, endpoint: str, request_of: Any) -> None:
    await post(graph, prompt(200), "victim")
    worker_id = await worker_of(stranger, Role.DECODE)
    await stranger.until(lambda views: held(views, worker_id) >= 192)
    for metadata in ({}, signed("a secret of another graph", endpoint, worker_id, request_of)):
        await expect_refusal(stranger, endpoint, worker_id, request_of, metadata)
    assert held(await stranger.store.snapshot(), worker_id) >= 192


async def test_a_recorded_call_cannot_be_sent_again_nor_to_another_worker(stranger: Driver) -> None:
    worker_id, other_id = await worker_of(stranger, Role.DECODE), await worker_of(stranger, Role.PREFILL)
    metadata = signed(SECRET, KV_ENDPOINT, worker_id, MATCH)
    (reply,) = [chunk async for chunk in await stranger.call(KV_ENDPOINT, worker_id, MATCH, context_with(metadata))]
    assert reply == {"matched": 0}
    for target in (worker_id, other_id):
        await expect_refusal(stranger, KV_ENDPOINT, target, MATCH, metadata)


async def test_a_client_cannot_sign_for_the_coordinator(graph: Graph, stranger: Driver) -> None:
    """Dynamo puts a client's headers of this kind into the metadata of its request."""
    assert stranger.clients
    served = await post(graph, prompt(50), "signs", **{f"{METADATA_PREFIX}{SIGNATURE}": "1 c 1 2 3"})
    assert served["retries"] == 0


async def test_the_log_names_a_stranger_once_and_no_secret(graph: Graph, stranger: Driver) -> None:
    worker_id = await worker_of(stranger, Role.PREFILL)
    for _ in range(5):
        await expect_refusal(stranger, KV_ENDPOINT, worker_id, MATCH, {})
    log = graph.log(graph.processes[worker_id])
    assert log.count("a call of an unknown process to the endpoint kv was refused") == 1
    assert "Traceback" not in log
    assert SECRET not in log


async def expect_refusal(driver: Driver, endpoint: str, worker_id: str, request: Any, metadata: dict[str, str]) -> None:
    """Rounds are refused with an error, questions about KV with an answer."""
    if endpoint == KV_ENDPOINT:
        (reply,) = [chunk async for chunk in await driver.call(endpoint, worker_id, request, context_with(metadata))]
        assert reply.keys() == {"error"}
        assert "the call was refused" in reply["error"]
    else:
        with pytest.raises(Exception, match="ampd-error 503: the call was refused"):
            [chunk async for chunk in await driver.call(endpoint, worker_id, request, context_with(metadata))]


def signed(secret: str, endpoint: str, worker_id: str, request: Any) -> dict[str, str]:
    metadata: dict[str, str] = {}
    Signer((secret.encode(),), "worker-1").sign(
        metadata, endpoint, worker_id, request if isinstance(request, dict) else {}
    )
    return metadata


def context_with(metadata: dict[str, str]) -> Context:
    context = Context()
    for name, value in metadata.items():
        context.metadata[name] = value
    return context
