"""While Redis is away a coordinator refuses rounds for their predicted wait, as it does at other times."""

import asyncio
from pathlib import Path

import httpx
import pytest

from ampd.state.embedded import EmbeddedRedis
from ampd.wire import retry_after_s
from tests.harness.fork_server import ForkServer
from tests.harness.graph import HELLO, chat, empty_graph, profile, session
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

LONG = [{"role": "user", "content": "The weather in Paris is mild today. " * 200}]
PREFILL_S = 4.0
"""Longer than a new session may wait."""


async def test_new_sessions_are_refused_while_redis_is_away_and_served_when_it_is_back(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    with EmbeddedRedis() as redis, empty_graph(tmp_path, redis.url, fork_server) as graph:
        perf = profile(tmp_path, prefill_s=0.005, long_prefill_s=PREFILL_S, step_s=0.001)
        coordinator = graph.start_coordinator("always-local", "--perf", str(perf))
        graph.start_frontend()
        await graph.new_worker("decode", perf)
        await graph.until_answers([coordinator])
        async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:

            async def ask(name: str, messages: list[dict[str, str]]) -> httpx.Response:
                body = chat(messages, max_tokens=1)
                return await client.post("/v1/chat/completions", json=body, headers=session(name))

            redis.stop()
            assert (await ask("alone", HELLO)).status_code == 200
            assert "going on with the last view" in graph.log(coordinator)
            answers = await asyncio.gather(*(ask(f"s{number}", LONG) for number in range(4)))
            assert sorted(answer.status_code for answer in answers) == [200, 429, 429, 429]
            refused = next(answer for answer in answers if answer.status_code == 429)
            assert "the predicted wait is" in refused.json()["message"]
            assert (retry_after_s(refused.json()["message"]) or 0) >= 1
            redis.start()
            await until(lambda: "shared state is back" in graph.log(coordinator))
            assert (await ask("later", LONG)).status_code == 200
        await graph.until_views(lambda views: views and not any(view.queued_prefills for view in views))
