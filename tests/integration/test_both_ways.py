"""The same rounds, straight from the worker to the frontend and through the pipe: answers, records, usage, metrics."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ampd.cli.serve.graph import system_environment
from ampd.state.embedded import EmbeddedRedis
from tests.harness.fork_server import ForkServer
from tests.harness.graph import (
    HELLO,
    SHORT_LEASE,
    Graph,
    chat,
    completion,
    empty_graph,
    events,
    profile,
    record,
    session,
)
from tests.harness.ports import free_ports
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

HOST = "127.0.0.1"


def prompt(number: int) -> list[int]:
    """Sessions share no prefix, because it takes a while until a coordinator knows of one."""
    return [5 + number + position % 300 for position in range(80)]


PROMPT = prompt(0)
ROUNDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("first", {"prompt": PROMPT, "max_tokens": 8}),
    ("first", {"prompt": PROMPT * 2, "max_tokens": 8, "stream": True}),
    ("local", {"prompt": prompt(1), "max_tokens": 8, "presence_penalty": 0.5}),
    ("two choices", {"prompt": prompt(2), "max_tokens": 8, "n": 2}),
    ("one token", {"prompt": prompt(3), "max_tokens": 1}),
    ("one token", {"prompt": prompt(3) * 2, "max_tokens": 8}),
    ("log-probabilities", {"prompt": prompt(4), "max_tokens": 4, "logprobs": 2, "stream": True}),
    ("", {"prompt": prompt(5), "max_tokens": 4}),
    ("too long", {"prompt": PROMPT * 40, "max_tokens": 4}),
    ("wrong", {"prompt": PROMPT, "max_tokens": 4, "nvext": {"annotations": ["ttft_target:never"]}}),
)
"""Session and request."""
CHANGING = ("_s", "kv_read_s", "request_id", "trace_id", "worker", "estimates", "session_id", "session_key")
"""What parts of the record begin or end with that differ from run to run."""


WAYS = ("router", "tests.harness.piping_coordinator")


@pytest.fixture
def graphs(tmp_path: Path, redis_server: EmbeddedRedis, fork_server: ForkServer) -> Iterator[Graph]:
    """An empty graph for each of the two ways, one after the other."""

    def each() -> Iterator[Graph]:
        for module in WAYS:
            folder = tmp_path / module
            folder.mkdir()
            with empty_graph(folder, redis_server.url, fork_server) as graph:
                yield graph

    return each()


@pytest.mark.long
async def test_both_ways_give_the_same(graphs: Iterator[Graph]) -> None:
    direct, piped = [await served(graph, module) for graph, module in zip(graphs, WAYS, strict=True)]
    assert (direct[1].pop("ampd_rounds_handed_on"), piped[1].pop("ampd_rounds_handed_on")) == (1, 0)
    for straight, passed in zip(direct[0], piped[0], strict=True):
        assert straight == passed, (straight[3], passed[3])
    assert direct[1] == piped[1]
    answers, metrics = direct
    assert [answer[0] for answer in answers] == [200] * 8 + [400] * 2
    usages = [answer[2] for answer in answers[:8]]
    tokens = [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages]
    assert tokens == [(80, 8), (160, 8), (80, 8), (80, 16), (80, 1), (160, 8), (80, 4), (80, 4)]
    routes = [answer[3]["route"] for answer in answers[:8]]
    assert routes == ["remote", "remote", "local", "local", "remote", "remote", "remote", "remote"]
    assert metrics["ampd_output_tokens_total"] == 8 + 8 + 8 + 8 + 1 + 8 + 4 + 4
    assert metrics["ampd_sessions_bound_total"] == 6


@pytest.mark.long
async def test_both_ways_go_on_after_the_death_of_a_worker(graphs: Iterator[Graph]) -> None:
    """The round in progress is continued, and its session moves; a round with a grammar comes before."""
    direct, piped = [await survived(graph, module) for graph, module in zip(graphs, WAYS, strict=True)]
    assert direct == piped
    tokens, places = direct[-2:]
    assert tokens == [(80, 4), (80, 40), (160, 4)]
    assert places == [("local", 0, 1), ("local", 1, 2), ("local", 0, 2)]


async def survived(graph: Graph, module: str) -> tuple[Any, ...]:
    """(call within the grammar, texts, counts of usage, (route, retries, epoch)) of the rounds."""
    replies = graph.folder / "replies.jsonl"
    replies.write_text(json.dumps({"session": "guided", "tool_calls": [{"name": "f", "arguments": {}}]}))
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.0, step_s=0.02)
    for _ in range(2):
        await graph.new_worker("decode", perf, *SHORT_LEASE, "--replies", str(replies))
    coordinator = graph.start_coordinator("always-local", module=module)
    graph.start_frontend()
    await graph.until_answers([coordinator])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        tools = [{"type": "function", "function": {"name": "f"}}]
        body = chat(HELLO, max_tokens=30, tools=tools, tool_choice="required")
        guided = await client.post("/v1/chat/completions", json=body, headers=session("guided"))
        (called,) = guided.json()["choices"][0]["message"]["tool_calls"]
        rounds = [await whole(client, PROMPT, 4)]
        owner = graph.processes[rounds[0][2]["decode_worker"]]
        body = {**completion(PROMPT, max_tokens=40), "stream": True, "stream_options": {"include_usage": True}}
        text = ""
        made: Any = {}
        usage: Any = {}
        async with client.stream("POST", "/v1/completions", json=body, headers=session("s")) as reply:
            async for event in events(reply):
                text += "".join(choice["text"] for choice in event["choices"])
                made, usage = record(event) if event.get("nvext") else made, event.get("usage") or usage
                if len(text) > 5 and owner not in graph.supervisor.ended():
                    await graph.end(owner, signal.SIGKILL)
        rounds += [(text, usage, made), await whole(client, PROMPT * 2, 4)]
    return (
        (called["function"], guided.json()["usage"]),
        [text for text, _, _ in rounds],
        [(usage["prompt_tokens"], usage["completion_tokens"]) for _, usage, _ in rounds],
        [(made["route"], made["retries"], made["epoch"]) for _, _, made in rounds],
    )


async def whole(client: httpx.AsyncClient, prompt: list[int], tokens: int) -> tuple[str, Any, Any]:
    """(text, usage, record) of a round."""
    body = completion(prompt, max_tokens=tokens)
    reply = (await client.post("/v1/completions", json=body, headers=session("s"))).json()
    return reply["choices"][0]["text"], reply["usage"], record(reply)


async def served(graph: Graph, module: str) -> tuple[list[Any], dict[str, float]]:
    """(status, texts, usage and record of each round, the coordinator's counts)."""
    (port,) = free_ports(1)
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.0, step_s=0.002)
    for role in ("prefill", "decode"):
        await graph.new_worker(role, perf, "--max-context-tokens", "2048")
    graph.environment |= system_environment(HOST, port)
    coordinator = graph.start_coordinator("always-remote", module=module)
    graph.environment |= system_environment(HOST, None)
    graph.start_frontend()
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:

        async def is_known() -> bool:
            try:
                return bool((await client.get("/v1/models")).json().get("data"))
            except httpx.TransportError:
                return False

        await until(is_known)
        assert coordinator not in graph.supervisor.ended()

        async def counts() -> dict[str, float]:
            text = (await client.get(f"http://{HOST}:{port}/metrics")).text
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            found: dict[str, float] = {}
            for sample in samples:
                if sample.name.startswith("ampd_") and sample.name.endswith(("_total", "_count", "_handed_on")):
                    labels = {name: value for name, value in sample.labels.items() if name not in ("le", "worker_id")}
                    ours = {name: value for name, value in labels.items() if not name.startswith("dynamo")}
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
                    if not sample.name.endswith("_handed_on"):
                        found[f"{sample.name} {sorted(ours.items())}"] = sample.value
            return found

        answers: list[Any] = []

        async def all_ended() -> bool:
            """A round that begins before its coordinator knows of the end of the last one finds less history."""
            return (await counts()).get("ampd_rounds_total", 0) == sum(status == 200 for status, *_ in answers)

        for name, body in ROUNDS:
            answers.append(await answer(client, name, dict(body)))
            await until(all_ended)
        kept = ("ampd_rounds", "ampd_routes", "ampd_prompt", "ampd_output", "ampd_sessions_bound", "ampd_round_")
        found = {name: value for name, value in (await counts()).items() if name.startswith(kept)}
    return answers, {name: value for name, value in found.items() if "outcome" not in name}


async def answer(client: httpx.AsyncClient, name: str, body: dict[str, Any]) -> Any:
    headers = session(name) if name else {}
    request = completion(body.pop("prompt"), **body)
    if not body.get("stream"):
        reply = await client.post("/v1/completions", json=request, headers=headers)
        if reply.status_code != 200:
            return reply.status_code, reply.json()["message"].partition(" (request_id")[0]
        whole = reply.json()
        texts = [(choice["text"], choice.get("logprobs"), choice["finish_reason"]) for choice in whole["choices"]]
        return 200, texts, whole["usage"], steady(record(whole))
    request["stream_options"] = {"include_usage": True}
    async with client.stream("POST", "/v1/completions", json=request, headers=headers) as reply:
        seen = [event async for event in events(reply)]
    text = "".join(choice["text"] for event in seen for choice in event["choices"])
    ends = [choice["finish_reason"] for event in seen for choice in event["choices"] if choice.get("finish_reason")]
    (usage,) = [event["usage"] for event in seen if event.get("usage")]
    first, *_, last = [record(event) for event in seen if event.get("nvext")]
    assert first["ttft_s"] == last["ttft_s"] > 0
    return reply.status_code, (text, ends), usage, steady(last)


def steady(made: dict[str, Any]) -> dict[str, Any]:
    """What is the same in each run."""
    return {name: value for name, value in made.items() if not (name.endswith(CHANGING) or name.startswith(CHANGING))}
