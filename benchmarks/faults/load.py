"""Agents that run sessions against the graph, and compare every token with the one that it must be."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import httpx

from benchmarks.faults.tokens import Expected, random_prompt
from tests.harness.graph import completion, session

RETRY_PAUSE_S = 0.2
_BROKEN = "the connection broke"


class Ending(StrEnum):
    """How a round ended, as its client saw it.

    `COMPLETED`: all tokens, and they are right. `FAILED`: an error status with a message, an error in the stream, or a
    connection that broke before the end. `LOST`: no end within the bound, or an end that looks complete and is not.
    `WRONG`: at least one token is not the right one. `LEFT`: the client went away.
    """

    COMPLETED = "completed"
    FAILED = "failed"
    LOST = "lost"
    WRONG = "wrong"
    LEFT = "left"


@dataclass
class RoundResult:
    """One request and what came of it. Times are of `time.monotonic`.

    Attributes:
        token_s: when each chunk with text arrived.
        detail: the error, or the reason why the round counts as lost or wrong.
        records: the decision records in the stream, the first and the last.
        is_final: the round ends its session.
    """

    session_id: str
    started_s: float
    ended_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    ending: Ending = Ending.LOST
    detail: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)
    is_final: bool = False

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.started_s if self.token_s else None

    def stalls(self, since_s: float, longest_s: float) -> list[tuple[float, float]]:
        """Begin and end of all waits after `since_s` that were longer than `longest_s`: for a token, or for the end."""
        moments = [self.started_s, *self.token_s, self.ended_s]
        waits = [(max(before, since_s), after) for before, after in pairwise(moments)]
        return [(before, after) for before, after in waits if after - before > longest_s]


class Client:
    """Sends rounds.

    Args:
        urls: gives the frontends that a new request may go to.
        bound_s: a round that has not ended after this time is lost.
    """

    def __init__(self, urls: Callable[[], Sequence[str]], expected: Expected, bound_s: float) -> None:
        self.results: list[RoundResult] = []
        self.bound_s = bound_s
        self._urls = urls
        self._expected = expected
        self._turns = 0
        self._http = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def close(self) -> None:
        await self._http.aclose()

    def open_sessions(self) -> list[str]:
        """Sessions whose last round did not end them, because it was no final one or did not complete."""
        last = {result.session_id: result for result in self.results}
        return [name for name, result in last.items() if not (result.is_final and result.ending is Ending.COMPLETED)]

    def next_url(self) -> str:
        """The frontends take turns."""
        self._turns += 1
        urls = self._urls()
        return urls[self._turns % len(urls)]

    async def send(
        self,
        session_id: str,
        prompt: Sequence[int],
        output_tokens: int,
        *,
        url: str | None = None,
        is_final: bool = False,
        options: Mapping[str, Any] = MappingProxyType({}),
        on_token: Callable[[RoundResult], None] = lambda _: None,
    ) -> RoundResult:
        """Send one round and judge what comes of it. Being cancelled counts as a client that leaves."""
        result = RoundResult(session_id, time.monotonic(), is_final=is_final)
        self.results.append(result)
        expected = self._expected.text(prompt, output_tokens)
        body = completion(list(prompt), max_tokens=output_tokens, stream=True, temperature=0, **options)
        try:
            async with asyncio.timeout(self.bound_s):
                headers = session(session_id, final=is_final)
                await self._stream(url or self.next_url(), body, headers, result, on_token)
        except TimeoutError:
            result.detail = f"no end within {self.bound_s:g} s"
        except httpx.HTTPError as error:
            result.ending, result.detail = Ending.FAILED, f"{_BROKEN}: {error!r}"
        except asyncio.CancelledError:
            result.ending = Ending.LEFT
            raise
        finally:
            result.ended_s = time.monotonic()
            _check_tokens(result, expected)
        return result

    async def _stream(
        self,
        url: str,
        body: dict[str, Any],
        headers: dict[str, str],
        result: RoundResult,
        on_token: Callable[[RoundResult], None],
    ) -> None:
        async with self._http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as reply:
            if reply.status_code != httpx.codes.OK:
                _refused(result, reply.status_code, (await reply.aread()).decode(errors="replace"))
                return
            async for event in _events(reply):
                if "error" in event:
                    result.ending, result.detail = Ending.FAILED, str(event["error"])
                    return
                _take(event, result)
                on_token(result)
        if result.finish_reason is not None:
            result.ending = Ending.COMPLETED
        else:
            result.detail = "the stream ended like a complete one, without a finish reason"


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream. An SSE event of the kind `error` has the key `error`."""
    kind, comments = "", []
    async for line in reply.aiter_lines():
        if line.startswith("event:"):
            kind = line.removeprefix("event:").strip()
        elif line.startswith(":"):
            comments.append(line.removeprefix(":").strip())
        elif line.startswith("data:") and (data := line.removeprefix("data:").strip()) != "[DONE]":
            yield {"error": data} if kind == "error" else json.loads(data)
            kind = ""
        elif not line and kind == "error":
            yield {"error": " ".join(comments) or "an error without a message"}
            kind = ""


def _take(event: dict[str, Any], result: RoundResult) -> None:
    for choice in event.get("choices", ()):
        if choice.get("text"):
            result.text += choice["text"]
            result.token_s.append(time.monotonic())
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
    data = (event.get("nvext") or {}).get("engine_data") or {}
    if "ampd" in data:
        result.records = [*result.records[:1], data["ampd"]]


def _refused(result: RoundResult, status: int, text: str) -> None:
    if text.strip():
        result.ending, result.detail = Ending.FAILED, f"{status}: {text}"
    else:
        result.detail = f"{status} without a message"


def _check_tokens(result: RoundResult, expected: str | None) -> None:
    """Whatever the ending is, the text so far must be the beginning of the right one."""
    if expected is None:
        return
    is_right = result.text == expected if result.ending is Ending.COMPLETED else expected.startswith(result.text)
    if not is_right:
        result.ending, result.detail = Ending.WRONG, f"{result.text[-80:]!r} instead of {expected[:80]!r}"


class Agent:
    """One session: rounds one after the other. A round that failed is sent again, to another frontend.

    Attributes:
        context: prompt and output of the last round. prompt: of the round in progress, or else of the last one.
    """

    def __init__(self, client: Client, expected: Expected, session_id: str, rng: random.Random) -> None:
        self.session_id = session_id
        self.context: list[int] = []
        self.prompt: list[int] = []
        self._client = client
        self._expected = expected
        self._rng = rng

    async def round(
        self,
        increment_tokens: int,
        output_tokens: int,
        *,
        url: str | None = None,
        is_final: bool = False,
        options: Mapping[str, Any] = MappingProxyType({}),
        on_token: Callable[[RoundResult], None] = lambda _: None,
    ) -> RoundResult:
        """Run the next round until it completes, or until the bound is over."""
        self.prompt = prompt = self.context + random_prompt(self._rng, increment_tokens)
        give_up_s = time.monotonic() + self._client.bound_s
        while True:
            result = await self._client.send(
                self.session_id, prompt, output_tokens, url=url, is_final=is_final, options=options, on_token=on_token
            )
            if result.ending is not Ending.FAILED or time.monotonic() > give_up_s:
                break
            url = None
            await asyncio.sleep(RETRY_PAUSE_S)
        self.context = prompt + self._expected.output(prompt, output_tokens)
        return result


class RunningAgents:
    """Agents that run in the background, a task each, until the load is over."""

    def __init__(self) -> None:
        self._is_over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def _start(self, agents: Iterable[Coroutine[Any, Any, None]]) -> None:
        self._tasks = [asyncio.create_task(agent) for agent in agents]

    async def cancel(self) -> None:
        """End all requests, because the run has failed. Their connections are closed afterwards."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        self._is_over.set()
        await asyncio.gather(*self._tasks)


class BackgroundLoad(RunningAgents):
    """Agents that run while a fault strikes: each waits for its tools between two rounds.

    `stop` lets each of them end its session with a last round.
    """

    INITIAL_TOKENS, INCREMENT_TOKENS, OUTPUT_TOKENS = 64, 32, 8
    LONGEST_GAP_S = 0.25
    MOST_ROUNDS = 40

    def __init__(self, client: Client, expected: Expected, name: str, agents: int, rng: random.Random) -> None:
        super().__init__()
        self._agents = [Agent(client, expected, f"{name}-load-{number}", rng) for number in range(agents)]
        self._rng = rng
        self._start(self._run(agent) for agent in self._agents)

    async def _run(self, agent: Agent) -> None:
        await agent.round(self.INITIAL_TOKENS, self.OUTPUT_TOKENS)
        for _ in range(self.MOST_ROUNDS):
            if self._is_over.is_set():
                break
            await asyncio.sleep(self._rng.uniform(0.02, self.LONGEST_GAP_S))
            await agent.round(self.INCREMENT_TOKENS, self.OUTPUT_TOKENS)
        await self._is_over.wait()
        await agent.round(self.INCREMENT_TOKENS, self.OUTPUT_TOKENS, is_final=True)
