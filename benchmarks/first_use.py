"""Whether the first requests with penalties, a grammar or log-probabilities hold up the others of a decode worker.

    python -m benchmarks.first_use [--engine sglang]

starts a graph with one decode worker. While a stream runs, it sends the first request of each kind since the start,
and prints the longest gap of the stream meanwhile. An engine that compiles a function at its first use stands still
for 4 to 13 s then.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from itertools import pairwise
from typing import Any

import httpx

from ampd.errors import guarded
from benchmarks import markdown_table
from tools.demo import running_graph

_SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
_FIRST: dict[str, dict[str, Any]] = {
    "nothing special": {},
    "repetition penalty": {"repetition_penalty": 1.2},
    "presence and frequency penalties, least tokens": {
        "presence_penalty": 0.3,
        "frequency_penalty": 0.7,
        "min_tokens": 3,
    },
    "grammar": {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": _SCHEMA}}},
    "log-probabilities": {"logprobs": True, "top_logprobs": 3},
}
_PATH, _CHAT = "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
_STREAM_TOKENS, _MARGIN_S = 1500, 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("modelled", "sglang"), default="sglang")
    flags = ["--engine", parser.parse_args().engine, "--prefill", "1", "--decode", "1", "--port", "0"]
    with running_graph(flags, lambda line: print(line, file=sys.stderr, flush=True)) as url:
        rows = asyncio.run(_rows(url))
    print(markdown_table.table(["first request with", "status", "its seconds", "longest gap of the stream, s"], rows))
    return 0


async def _rows(url: str) -> list[list[str]]:
    arrivals_s: list[float] = []
    has_begun = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        stream = asyncio.create_task(_stream(client, arrivals_s, has_begun))
        await has_begun.wait()
        rows = [await _row(client, name, more, arrivals_s) for name, more in _FIRST.items()]
        assert not stream.done(), "the stream ended before the last request did"
        stream.cancel()
    return rows


async def _stream(client: httpx.AsyncClient, arrivals_s: list[float], has_begun: asyncio.Event) -> None:
    body = {**_CHAT, "max_tokens": _STREAM_TOKENS, "ignore_eos": True, "stream": True}
    async with client.stream("POST", _PATH, json=body) as answer:
        async for _ in answer.aiter_raw():
            arrivals_s.append(time.monotonic())
            has_begun.set()


async def _row(client: httpx.AsyncClient, name: str, more: dict[str, Any], arrivals_s: list[float]) -> list[str]:
    before, sent_s = len(arrivals_s), time.monotonic()
    answer = await client.post(_PATH, json={**_CHAT, "max_tokens": 12, **more})
    took_s = time.monotonic() - sent_s
    await asyncio.sleep(_MARGIN_S)
    gap_s = max(after - first for first, after in pairwise([*arrivals_s[before - 1 :], time.monotonic()]))
    return [name, str(answer.status_code), f"{took_s:.2f}", f"{gap_s:.2f}"]


if __name__ == "__main__":
    sys.exit(guarded(main))
