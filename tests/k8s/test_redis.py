"""The Redis of the manifests, started as they say: rights that suffice for the graph, and for nothing else."""

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from ampd.state.redis_store import StateStore, open_store
from ampd.state.schema import Schema
from ampd.state.store import (
    Binding,
    RoleAssigned,
    RouteWrite,
    SessionLimits,
    StateUnavailableError,
    WorkerRemoved,
)
from ampd.types import CoordinatorView, PrefillTask, Role, Slo, WorkerView
from tests.k8s.pod_lab import PodLab, Running
from tests.k8s.pods import environment, pods
from tests.k8s.rendering import GRAPHS, K8S, for_each, needs_kubectl, rendered
from tests.waiting import PATIENCE_S

pytestmark = needs_kubectl

NAMESPACE = "ampd"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The Redis of base alone, with its real command, files and password."""
    documents = [each for each in rendered("base") if each["kind"] != "DynamoGraphDeployment"]
    with PodLab(documents, tmp_path_factory.mktemp("redis")) as lab:
        (replica,) = lab.of("ampd-redis")
        lab.start(replica)
        lab.until(replica, "readinessProbe")
        lab.until(replica, "livenessProbe")
        yield replica
        assert not [*replica.folder.rglob("*.rdb"), *replica.folder.rglob("*.aof")]
        assert lab.end() == {}


def url(redis: Running, user: str = "ampd:{password}@") -> str:
    return f"redis://{user.format(password=redis.variables['REDIS_PASSWORD'])}127.0.0.1:{redis.ports['redis']}/0"


@pytest.fixture
async def client(redis: Running) -> AsyncIterator[Any]:
    connection = Redis.from_url(url(redis))
    yield connection
    await connection.aclose()


class Recording:
    """A store that notes which of its methods were called."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.called.add(name)
        return getattr(self._store, name)


async def test_the_graph_may_do_all_that_it_does(redis: Running) -> None:
    store = Recording(await open_store(url(redis), NAMESPACE))
    events, roles = store.watch(), store.watch_roles()
    await events.start()
    await roles.start()
    task = PrefillTask("t1", "s1", 100, 20, time.monotonic(), Slo(ttft_s=1.0, itl_s=0.05))
    await store.publish_worker(WorkerView(worker_id="d1", role=Role.DECODE), 60.0)
    outcome = await store.route(RouteWrite("s1", "d1", 0, "d1", task), SessionLimits(60.0))
    assert outcome.accepted
    assert [each.worker_id for each in await store.snapshot()] == ["d1"]
    assert await store.refresh([RouteWrite("s1", "d1", 1, "d1", None)], SessionLimits(60.0)) == []
    await store.finish_tasks("d1", ["t1"])
    assert await store.binding("s1") == Binding("s1", "d1", 1)
    assert (await store.rebind(outcome.binding, "d2", 60.0)).accepted
    assert (await store.lead("c1", 60.0)).leads
    assert await store.assign_role("c1", RoleAssigned("d1", Role.PREFILL, "", "test"), 60.0)
    assert (await anext(roles)).worker_id == "d1"
    await store.resign("c1")
    await store.publish_coordinator(CoordinatorView("c1", Slo(ttft_s=1.0, itl_s=0.05)), 60.0)
    assert (await store.overview()).workers
    await store.remove_coordinator("c1")
    await store.end_session("s1")
    assert await store.ended_sessions() == ["s1"]
    assert await store.record_death("prompt", "d1") == 1
    await store.announce(WorkerRemoved("d1"))
    await store.remove_worker("d1")
    assert await anext(events)
    assert await store.ping() > 0
    assert await store.server_mode() in ("standalone", "")
    assert list(store.readings(is_available=True))
    assert store.refused_ago_s() == float("inf")
    await events.aclose()
    await roles.aclose()
    await store.close()
    promised = {name for name, member in vars(StateStore).items() if isfunction(member) and not name.startswith("_")}
    assert promised - store.called == set(), "a new way to use the store is not tried with these rights"


async def test_nobody_enters_without_the_password(redis: Running) -> None:
    for user in ("", "ampd:wrong@", "default:@", f":{redis.variables['REDIS_PASSWORD']}@"):
        connection: Any = Redis.from_url(url(redis, user))
        with pytest.raises((AuthenticationError, NoPermissionError)):
            await connection.ping()
        await connection.aclose()
    with pytest.raises(StateUnavailableError, match=r"127\.0\.0\.1"):
        await open_store(url(redis, "ampd:wrong@"), NAMESPACE)


FORBIDDEN = [
    ("SET", "other", "1"),
    ("GET", "ampd:{other}:workers"),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("KEYS", "*"),
    ("CONFIG", "GET", "maxmemory"),
    ("ACL", "LIST"),
    ("DEBUG", "SLEEP", "0"),
    ("SHUTDOWN",),
    ("REPLICAOF", "127.0.0.1", "1"),
    ("MONITOR",),
    ("EVAL", "return redis.call('GET', 'other')", "0"),
    ("PUBLISH", "other", "x"),
    ("SUBSCRIBE", "ampd:{other}:events"),
]


@pytest.mark.parametrize("command", FORBIDDEN, ids=" ".join)
async def test_the_graphs_user_may_do_nothing_else(command: tuple[str, ...], client: Any) -> None:
    with pytest.raises(Exception, match=r"(?i)no permission|NOPERM|can't access|permissions|not allowed"):
        await client.execute_command(*command)
    assert await client.set(Schema(NAMESPACE).leader, b"c1", px=1)


MIB = 1 << 20


def subscribed(redis: Running, channel: str) -> socket.socket:
    """A subscriber that reads nothing until it is asked to."""
    words = ("AUTH", "ampd", redis.variables["REDIS_PASSWORD"], "SUBSCRIBE", channel)
    commands = [words[:3], words[3:]]
    connection = socket.create_connection(("127.0.0.1", redis.ports["redis"]), PATIENCE_S)
    for command in commands:
        parts = "".join(f"${len(word)}\r\n{word}\r\n" for word in command)
        connection.sendall(f"*{len(command)}\r\n{parts}".encode())
    answer = b""
    while not answer.endswith(b":1\r\n"):  # the number of its subscriptions
        answer += connection.recv(1 << 16)
        assert b"-" not in answer, answer
    return connection


def read_until_end(connection: socket.socket, expected: int) -> int:
    """Read this many bytes, or fewer if the server has cut the connection; returns how many."""
    received = 0
    while received < expected:
        try:
            part = connection.recv(MIB)
        except ConnectionResetError:
            break
        if not part:
            break
        received += len(part)
    return received


@pytest.mark.parametrize(("mib", "is_cut"), [(60, False), (150, True)])
async def test_a_coordinator_that_reads_late_is_cut_off_only_beyond_the_limit(
    redis: Running, client: Any, mib: int, is_cut: bool
) -> None:
    """Redis' own limit is 32 MB. Without any, a subscriber that never reads would fill the memory."""
    channel = Schema(NAMESPACE).events
    with subscribed(redis, channel) as late:
        heard = [await client.publish(channel, b"x" * MIB) for _ in range(mib)]
        received = await asyncio.to_thread(read_until_end, late, mib * MIB)
    assert heard[0] == 1
    assert (received < mib * MIB) == is_cut
    assert (heard[-1] == 0) == is_cut
    assert await client.set(Schema(NAMESPACE).leader, b"c1", px=1), "its memory is free again"


@for_each([each for each in GRAPHS if "external" not in each])
def test_it_keeps_nothing_and_drops_nothing(name: str) -> None:
    (config,) = (each for each in rendered(name) if each["metadata"]["name"].startswith("ampd-redis-config"))
    lines = [line for line in config["data"]["redis.conf"].splitlines() if line and not line.startswith("#")]
    assert {'save ""', "appendonly no", "maxmemory-policy noeviction"} <= set(lines)
    (limit_mib,) = (int(match[1]) for line in lines if (match := re.fullmatch(r"maxmemory (\d+)mb", line)))
    (redis,) = (pod for pod in pods(rendered(name)) if pod.name == "ampd-redis")
    (waiting_mib,) = (int(match[1]) for line in lines if (match := re.search(r"pubsub (\d+)mb", line)))
    assert redis.main["resources"]["limits"]["memory"] == "2Gi"
    assert limit_mib + 8 * waiting_mib <= 1600, "connections and the buffers of slow subscribers need room above it"


@for_each([each for each in GRAPHS if "redis-tls" in each])
def test_with_tls_there_is_no_other_port(name: str) -> None:
    documents = rendered(name)
    (redis,) = (pod for pod in pods(documents) if pod.name == "ampd-redis")
    variables = environment(redis, redis.main, documents)
    words = variables["REDIS_ARGS"].split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert (options.pop("--port"), options.pop("--tls-port"), options.pop("--tls-auth-clients")) == ("0", "6379", "no")
    assert options.keys() == {"--tls-cert-file", "--tls-key-file", "--tls-ca-cert-file"}
    mounts = [mount["mountPath"] for mount in redis.main["volumeMounts"]]
    assert all(str(Path(path).parent) in mounts for path in options.values())
    assert "--tls" in variables["REDIS_CLI_ARGS"].split()


def test_the_documented_rights_are_those_of_the_manifests() -> None:
    acl = (K8S / "base" / "redis" / "users.acl").read_text()
    documented = (K8S.parent / "docs" / "state.md").read_text()
    for right in re.findall(r"[+-]@?\w+", acl.splitlines()[1].partition("on ")[2].partition(" ")[2]):
        assert right in documented, right
