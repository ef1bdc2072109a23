"""The Redis of our own: it starts, it leaves nothing behind, and it says what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ampd.errors import RunError, UserError
from ampd.state import embedded
from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import open_store
from tests.harness.process_ends import alive, wait_for
from tests.waiting import PATIENCE_S


async def test_it_answers() -> None:
    with EmbeddedRedis() as server:
        store = await open_store(server.url, "n", timeout_s=PATIENCE_S)
        assert await store.ping() > 0
        await store.close()


def test_it_is_private_and_ends_with_its_context() -> None:
    with EmbeddedRedis() as server:
        pid, socket = server.pid, Path(server.url.removeprefix("unix://"))
        assert socket.is_socket()
        assert socket.stat().st_mode & 0o077 == 0
    assert pid is not None
    assert not alive(pid)
    assert not socket.parent.exists()


async def test_a_restart_keeps_the_url_and_nothing_else(make: Any) -> None:
    with EmbeddedRedis() as server:
        url = server.url
        store = await open_store(url, "n", timeout_s=PATIENCE_S)
        await store.publish_worker(make.view("d1"), 60)
        server.stop()
        server.start()
        assert server.url == url
        assert await store.snapshot() == []
        await store.close()


def test_it_dies_with_a_parent_that_is_killed() -> None:
    code = (
        "from ampd.state.embedded import EmbeddedRedis\n"
        "import sys\n"
        "with EmbeddedRedis() as server:\n"
        "    print(server.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    wait_for(lambda: not alive(pid))


def test_a_bad_argument_is_reported_with_the_servers_words() -> None:
    with (
        pytest.raises(RunError, match=r"redis-server ended at once: .+") as caught,
        EmbeddedRedis(arguments=["--nope", "1"]),
    ):
        pass
    assert len(str(caught.value).splitlines()) == 1


def test_a_failed_start_leaves_no_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RunError), EmbeddedRedis(arguments=["--nope", "1"]):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_long_temporary_directory_is_avoided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with EmbeddedRedis() as server:
        assert len(os.fsencode(server.url)) < 108
    assert list(deep.iterdir()) == []


class TestFindingAServer:
    def test_without_the_package_the_path_is_searched(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        server = tmp_path / "redis-server"
        server.write_text("#!/bin/sh\n")
        server.chmod(0o755)
        monkeypatch.setattr(embedded, "find_spec", lambda _: None)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert embedded.redis_server_path() == server

    def test_with_neither_the_user_is_told_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(embedded, "find_spec", lambda _: None)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(UserError, match=r"redis-server.*--state-url"), EmbeddedRedis():
            pass
