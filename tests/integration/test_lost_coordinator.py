"""A coordinator dies in the middle of rounds, which their workers finish without it."""

import asyncio
import signal
from typing import Any

import httpx
import pytest

from tests.harness.graph import Graph, completion, events, profile, session
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

OUTPUT_TOKENS = 60
PROMPT = [5 + position % 300 for position in range(60)]


class Stream:
    """A streamed completion of a session, which frontends keep at one coordinator.

    Attributes:
        has_tokens: set when the fifth chunk has come.
    """

    def __init__(self, client: httpx.AsyncClient, name: str, **options: Any) -> None:
        self._client = client
        self.name = name
        usage = {"include_usage": True}
        self._body = completion(PROMPT, max_tokens=OUTPUT_TOKENS, stream=True, stream_options=usage, **options)
        self.has_tokens = asyncio.Event()
        self.text = ""
        self.usage: tuple[int, int] | None = None
        self.error: Any = None

    async def read(self) -> None:
        async with self._client.stream("POST", "/v1/completions", json=self._body, headers=session(self.name)) as reply:
            chunks = 0
            async for event in events(reply):
                chunks += 1
                self.error = self.error or event.get("error")
                self.text += "".join(choice["text"] for choice in event.get("choices", ()))
                if usage := event.get("usage"):
                    self.usage = (usage["prompt_tokens"], usage["completion_tokens"])
                if chunks == 5:
                    self.has_tokens.set()


@pytest.mark.long
async def test_rounds_go_on_without_their_coordinator_and_sessions_at_another_one(graph: Graph) -> None:
    coordinators = [graph.start_coordinator("always-local") for _ in range(2)]
    graph.start_frontend(coordinators=2)
    steady = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.1)
    await graph.new_worker("decode", steady)
    await graph.until_answers(coordinators)
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        expected = Stream(client, "first")
        await expected.read()
        plain = [Stream(client, f"plain-{number}") for number in range(6)]
        penalized = [Stream(client, f"penalized-{number}", frequency_penalty=0.5) for number in range(6)]
        reading = [asyncio.create_task(stream.read()) for stream in (*plain, *penalized)]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(stream.has_tokens.wait() for stream in (*plain, *penalized)))
        await graph.end(coordinators[0], signal.SIGKILL)
        new = [Stream(client, f"new-{number}") for number in range(6)]
        await asyncio.gather(*reading, *(stream.read() for stream in new))
        again = [Stream(client, stream.name) for stream in plain]
        await asyncio.gather(*(stream.read() for stream in again))
    whole = [*plain, *penalized, *new, *again]
    assert [(stream.text, stream.usage, stream.error) for stream in whole] == [
        (expected.text, (len(PROMPT), OUTPUT_TOKENS), None)
    ] * len(whole)
