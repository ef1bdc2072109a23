"""Faults inside workers, where a worker ends while the harness still talks to it."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ampd.tiny_model import tiny_model_path
from benchmarks.faults.cluster import LiveGraph, Member
from benchmarks.faults.fault import Scene
from benchmarks.faults.kv_faults import disarm
from benchmarks.faults.load import Client
from benchmarks.faults.moments import Moment, Stage
from benchmarks.faults.tokens import expected_tokens

UNTIL_STDIN_ENDS = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(UNTIL_STDIN_ENDS, stdin=subprocess.PIPE) as process:
        yield process


async def test_a_worker_that_ends_need_not_be_disarmed(tmp_path: Path, process: Any) -> None:
    """A worker whose engine broke closes its socket before it has ended."""
    model, unused = tiny_model_path(), cast("Any", None)
    expected = expected_tokens(model)
    client = Client(lambda: ["http://127.0.0.1:9"], expected, 20.0)
    graph = LiveGraph(tmp_path, unused, unused, unused)
    member = Member("decode-0", "decode", process, tmp_path / "log", tmp_path / "no.sock", model)
    graph.members.append(member)
    scene = Scene(graph, client, Stage(graph, client, expected, "c0"), Moment.WAITING)
    disarming = asyncio.create_task(disarm(scene))
    await asyncio.sleep(0)
    process.stdin.close()
    await disarming
    assert not member.is_running
    await client.close()
