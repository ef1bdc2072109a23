"""`ampd top` as it is called: what it finds, what it prints once, and one line for whatever a caller can get wrong."""

import asyncio
import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ampd.cli.main import main
from ampd.state.embedded import EmbeddedRedis, LocalGraph, local_graphs, register
from ampd.state.redis_store import open_store
from ampd.types import CoordinatorView, Parallelism, Role, WorkerView
from tests.ampd.cli.top.lab import SLO, window
from tests.harness.tcp_redis import TcpRedis
from tests.waiting import PATIENCE_S

WORKERS = [
    WorkerView("d1", Role.DECODE, held_tokens={"s1": 70}),
    WorkerView("p1", Role.PREFILL, parallelism=Parallelism(4)),
]
COORDINATOR = CoordinatorView("c1", SLO, "ampd", window=window({"met": 3, "missed-itl": 1}, {"local on-time": 4}, 9.0))


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary directory of the test's own: graphs that others run on this machine are not found in it."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name in ("AMPD_STATE_URL", "AMPD_PERF", "DYN_NAMESPACE", "AMPD_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    return folder


@pytest.fixture
def redis(temporary: Path) -> Iterator[TcpRedis]:  # noqa: ARG001
    with TcpRedis() as server:
        yield server


def publish(url: str, namespace: str = "ampd", *, coordinator: bool = True) -> None:
    async def write() -> None:
        store = await open_store(url, namespace, timeout_s=PATIENCE_S)
        for view in WORKERS:
            await store.publish_worker(view, 60)
        if coordinator:
            await store.publish_coordinator(COORDINATOR, 60)
        await store.close()

    asyncio.run(write())


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(["top", "--once", *arguments])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert main(["top", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "s3cret" not in captured.err
    # Beside the warning of a password on the command line.
    (line,) = [line for line in captured.err.strip().splitlines() if "to every user of this machine" not in line]
    return line


def test_one_look_as_json_and_as_text(redis: TcpRedis, capsys: pytest.CaptureFixture[str]) -> None:
    publish(redis.url)
    whole = json.loads(printed(capsys, "--state-url", redis.url, "--json"))
    assert [(row["worker_id"], row["role"], row["tp"]) for row in whole["workers"]] == [
        ("d1", "decode", 1),
        ("p1", "prefill", 4),
    ]
    assert whole["window"]["attainment"]["rounds"] == 0.75
    assert whole["window"]["routes"] == {"local": 4, "remote": 0}
    assert whole["slo"] == {"ttft_s": 0.5, "itl_s": 0.05}
    assert whole["sessions"]["largest"] == [{"session_id": "s1", "worker_id": "d1", "tokens": 70}]
    text = printed(capsys, "--state-url", redis.url)
    assert "\x1b" not in text
    for word in ("75.0%!", "d1", "p1", "on-time", "s1"):
        assert word in text, word


def test_the_environment_names_the_state_as_for_other_commands(
    redis: TcpRedis, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(redis.tcp_url, "other")
    monkeypatch.setenv("AMPD_STATE_URL", redis.tcp_url)
    monkeypatch.setenv("DYN_NAMESPACE", "other")
    assert json.loads(printed(capsys, "--json"))["namespace"] == "other"


def test_the_graph_that_runs_here_is_found(redis: TcpRedis, capsys: pytest.CaptureFixture[str]) -> None:
    publish(redis.url, "mine")
    register(LocalGraph(namespace="mine", state_url=redis.url, url="http://127.0.0.1:1", perf="tiny-cpu"))
    whole = json.loads(printed(capsys, "--json"))
    assert (whole["namespace"], whole["state"]) == ("mine", redis.url)
    # and with it its performance model
    assert [row["queue_wait_s"] for row in whole["workers"]] == [0.0, 0.0]
    assert "mine" in printed(capsys, "--namespace", "mine")


def test_of_several_graphs_one_must_be_chosen(redis: TcpRedis, capsys: pytest.CaptureFixture[str]) -> None:
    publish(redis.url, "mine")
    register(LocalGraph(namespace="mine", state_url=redis.url, url="http://127.0.0.1:1", perf="tiny-cpu"))
    with EmbeddedRedis() as other:
        register(LocalGraph(namespace="theirs", state_url=other.url, url="http://127.0.0.1:2", perf="no-such"))
        publish(other.url, "theirs")
        line = refused(capsys, 2)
        assert "--url http://127.0.0.1:1" in line
        assert "--url http://127.0.0.1:2" in line
        assert json.loads(printed(capsys, "--json", "--url", "http://localhost:2/v1"))["namespace"] == "theirs"
        assert "there are: http://127.0.0.1:" in refused(capsys, 2, "--once", "--url", "http://127.0.0.1:3")
        assert json.loads(printed(capsys, "--json", "--namespace", "theirs"))["namespace"] == "theirs"
    assert json.loads(printed(capsys, "--json"))["namespace"] == "mine"


def test_notes_that_were_left_behind_are_not_followed(redis: EmbeddedRedis, temporary: Path) -> None:
    graph = LocalGraph(namespace="n", state_url=redis.url, url="http://127.0.0.1:1", perf="tiny-cpu")
    register(graph)
    broken = temporary / "ampd-redis-broken"
    broken.mkdir()
    (broken / "graph.json").write_text("{")
    assert local_graphs() == [graph]
    redis.stop()
    assert local_graphs() == []
    redis.start()


def test_nothing_running_here_is_one_line(
    temporary: Path,  # noqa: ARG001
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 6379)) == 0:
            pytest.skip("a Redis runs at the place where one is looked for last")
    line = refused(capsys, 2, "--once")
    for words in ("--state-url", "AMPD_STATE_URL", "no `ampd serve` runs on this machine"):
        assert words in line, words


def test_graphs_of_other_namespaces_are_named(redis: EmbeddedRedis, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 6379)) == 0:
            pytest.skip("a Redis runs at the place where one is looked for last")
    register(LocalGraph(namespace="mine", state_url=redis.url, url="http://127.0.0.1:1", perf="tiny-cpu"))
    line = refused(capsys, 2, "--once", "--namespace", "nothere")
    assert "no `ampd serve` of namespace nothere runs on this machine (mine does)" in line


def test_a_redis_that_does_not_answer_is_one_line(
    temporary: Path,  # noqa: ARG001
    unused_tcp_port: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refused(capsys, 2, "--once", "--state-url", f"redis://me:s3cret@127.0.0.1:{unused_tcp_port}/0")
    assert f"127.0.0.1:{unused_tcp_port}" in line
    assert "--state-url" in line
    assert "s3cret" not in line
    assert ".;" not in line


@pytest.mark.parametrize(
    ("credentials", "why"),
    [
        ("", "Authentication required"),
        (":s3cret@", "the user or password is wrong"),
        ("nobody:right@", "the user or password is wrong"),
    ],
)
def test_wrong_credentials_are_one_line(
    temporary: Path,  # noqa: ARG001
    capsys: pytest.CaptureFixture[str],
    credentials: str,
    why: str,
) -> None:
    with TcpRedis(["--requirepass", "right"]) as server:
        line = refused(capsys, 2, "--once", "--state-url", server.tcp_url.replace("://", f"://{credentials}"))
        assert f"{why}; name the graph's Redis" in line
        assert "redis://USER:PASSWORD@HOST" in line
        assert "s3cret" not in line


def test_a_user_without_the_rights_is_one_line(
    temporary: Path,  # noqa: ARG001
    capsys: pytest.CaptureFixture[str],
) -> None:
    user = "--user weak on nopass resetchannels ~ampd:{ampd}:* +@connection +ping"
    with TcpRedis(user.split()) as server:
        line = refused(capsys, 2, "--once", "--state-url", server.tcp_url.replace("://", "://weak:x@"))
        assert "docs/state.md" in line


def test_nobody_alive_is_one_line_and_a_failure(redis: EmbeddedRedis, capsys: pytest.CaptureFixture[str]) -> None:
    publish(redis.url, "theirs")
    line = refused(capsys, 1, "--once", "--state-url", redis.url, "--namespace", "mine")
    assert "mine" in line
    assert "--namespace" in line


def test_workers_without_a_coordinator_are_shown(redis: EmbeddedRedis, capsys: pytest.CaptureFixture[str]) -> None:
    publish(redis.url, coordinator=False)
    assert "no coordinator is alive" in printed(capsys, "--state-url", redis.url)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--nonsense"], "--nonsense"),
        (["--interval-s", "0"], "interval-s"),
        (["--interval-s", "soon"], "interval-s"),
        (["--state-url", "host:6379"], "state URL"),
        (["--state-url", "redis://host:port"], "state URL"),
        (["--namespace", "two words"], "namespace"),
        (["--perf", "no-such"], "tiny-cpu"),
    ],
)
def test_a_wrong_call_is_one_line(
    temporary: Path,  # noqa: ARG001
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    word: str,
) -> None:
    assert word in refused(capsys, 2, "--once", *arguments)
