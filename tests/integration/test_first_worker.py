"""Coordinators that start before the first worker, each test in a graph of its own.

They are a module of their own, so that no other graph takes inotify instances meanwhile: the kernel has few.
"""

from pathlib import Path

import pytest

from ampd.state.embedded import EmbeddedRedis
from tests.harness.fork_server import ForkServer
from tests.harness.graph import chat, empty_graph, profile

pytestmark = pytest.mark.slow

LIMIT_TOKENS = 2048
LONG = [{"role": "user", "content": "The weather in Paris is mild today. " * 400}]


async def test_a_coordinator_whose_dynamo_ends_says_so(
    tmp_path: Path, redis_server: EmbeddedRedis, fork_server: ForkServer
) -> None:
    with empty_graph(tmp_path, redis_server.url, fork_server) as graph:
        graph.start_worker("decode", profile(tmp_path, prefill_s=0.005, long_prefill_s=0.0, step_s=0.002))
        await graph.until_workers(1)
        name = graph.start_coordinator("always-local", module="tests.harness.ending_coordinator")
        assert "exit code 1" in await graph.until_ended(name)
        assert "Dynamo ended without a signal" in graph.log(name)


@pytest.mark.parametrize("late_module", ["router", "tests.harness.late_coordinator"])
async def test_coordinators_that_started_before_the_workers_register_their_context(
    tmp_path: Path, redis_server: EmbeddedRedis, fork_server: ForkServer, late_module: str
) -> None:
    with empty_graph(tmp_path, redis_server.url, fork_server) as graph:
        modules = ("router", late_module)
        coordinators = [graph.start_coordinator("always-local", module=module) for module in modules]
        graph.start_frontend()
        await graph.until_announced(2)
        await graph.until_answers(coordinators, (503,))
        perf = profile(tmp_path, prefill_s=0.005, long_prefill_s=0.0, step_s=0.002)
        graph.start_worker("decode", perf, "--max-context-tokens", str(LIMIT_TOKENS))
        long = chat(LONG, max_tokens=2, stream=True)
        # A coordinator that has not learnt of the workers yet still serves with the old context.
        await graph.until_answers(coordinators, (400,), long)
        await graph.end(coordinators[0])
        await graph.until_registered(1)
        await graph.until_answers(coordinators[1:], (400,), long)
        await graph.until_answers(coordinators[1:])


async def test_a_coordinator_that_waits_for_its_first_decode_worker_ends_when_asked(
    tmp_path: Path, redis_server: EmbeddedRedis, fork_server: ForkServer
) -> None:
    with empty_graph(tmp_path, redis_server.url, fork_server) as graph:
        name = graph.start_coordinator("always-remote")
        await graph.until_announced(1)
        await graph.until_registered(0)
        await graph.end(name)
        assert "exit code 0" in graph.supervisor.ended()[name]
