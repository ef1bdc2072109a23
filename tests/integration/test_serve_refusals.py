"""Refusals as clients of a usual `ampd serve` get them, by its status relay; and how relay and frontend end."""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import pytest

from tests.harness.graph import HELLO, chat, profile, session
from tests.integration.test_serve import Graph, serving
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHATS = "/v1/chat/completions"
FRONTEND, RELAY = "dynamo.frontend", "router.status_relay"


@contextmanager
def slow_graph(folder: Path, *flags: str, stderr: IO[str] | None = None) -> Iterator[Graph]:
    """A graph whose rounds take 50 ms per token."""
    perf = profile(folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.05)
    usual = ["--engine", "modelled", "--perf", str(perf), "--log-dir", str(folder / "logs")]
    with serving(*usual, *flags, stderr=stderr) as graph:
        yield graph


async def test_a_stream_that_is_refused_is_a_429_with_the_time_to_come_back(tmp_path: Path) -> None:
    with slow_graph(tmp_path, "--router-args", "--max-rounds 1") as graph:
        async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
            long = chat(HELLO, max_tokens=10_000, ignore_eos=True, stream=True)
            short = chat(HELLO, max_tokens=2, stream=True)
            async with client.stream("POST", CHATS, json=long, headers=session("long")) as stream:
                chunks = stream.aiter_lines()
                await anext(chunks)
                refused = await client.post(CHATS, json=short, headers=session("new"))
                assert refused.status_code == 429, refused.text
                assert int(refused.headers["retry-after"]) >= 1

            async def is_served() -> bool:
                return (await client.post(CHATS, json=short, headers=session("new"))).status_code == 200

            await until(is_served)  # long before the end of the round whose client has left


async def test_a_relay_that_is_killed_takes_its_frontend_with_it_even_if_that_is_stopped(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with errors.open("w") as stream, slow_graph(tmp_path, stderr=stream) as graph:
        frontend = graph.pid_of(FRONTEND)
        watch = os.pidfd_open(frontend)
        os.kill(frontend, signal.SIGSTOP)
        os.kill(graph.pid_of(RELAY), signal.SIGKILL)
        ended, _, _ = select.select([watch], [], [], PATIENCE_S)
        os.close(watch)
        assert ended
        await served_again(graph)
    assert "frontend ended with exit code -9 (Killed" in errors.read_text()


async def test_a_frontend_that_is_killed_starts_again_and_the_reason_is_told(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with errors.open("w") as stream, slow_graph(tmp_path, stderr=stream) as graph:
        os.kill(graph.pid_of(FRONTEND), signal.SIGKILL)
        await until(lambda: "it starts again in" in errors.read_text())
        await served_again(graph)
    assert "dynamo.frontend was ended by a signal: Killed" in errors.read_text()


async def served_again(graph: Graph) -> None:
    """Wait until a new frontend, at the old address, serves a round."""
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:

        async def is_served() -> bool:
            try:
                return (await client.post(CHATS, json=chat(HELLO, max_tokens=2), headers=session("s"))).is_success
            except httpx.TransportError:
                return False

        await until(is_served)
