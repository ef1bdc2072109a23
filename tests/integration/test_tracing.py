"""One round's way through a whole graph, by the ids that its client sent: logs, decision record, errors."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio

from ampd.state.embedded import EmbeddedRedis
from tests.harness.fork_server import ForkServer
from tests.harness.graph import HELLO, Graph, chat, completion, empty_graph, profile, record, session
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5 + position % 300 for position in range(80)]
LIMIT_TOKENS = 2048
LOCAL = {"presence_penalty": 0.5}
"""An option that keeps a round on its decode worker."""

Line = dict[str, Any]


@dataclass
class Site:
    """The graph and its processes, by name; workers also by id."""

    graph: Graph
    client: httpx.AsyncClient
    coordinator: str
    prefill_id: str
    decode_id: str

    @property
    def prefill(self) -> str:
        return self.graph.processes[self.prefill_id]

    @property
    def decode(self) -> str:
        return self.graph.processes[self.decode_id]

    def log(self, process: str) -> list[Line]:
        """All lines of a process. Each must be JSON."""
        text = self.graph.log(process)
        # The last line may be half written.
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def lines(self, process: str, **fields: str) -> list[Line]:
        """Lines of a process about rounds that have these values."""
        ours = [line for line in self.log(process) if line["target"].endswith("round_log")]
        return [line for line in ours if line.items() >= fields.items()]

    async def until_said(self, process: str, messages: set[str], **fields: str) -> dict[str, Line]:
        """Message -> line, once there are exactly these."""
        await until(lambda: messages <= {line["message"] for line in self.lines(process, **fields)})
        lines = {line["message"]: line for line in self.lines(process, **fields)}
        assert set(lines) == messages
        return lines

    async def round(self, prompt: list[int], trace_id: str, name: str, **options: Any) -> httpx.Response:
        headers = {**session(name), "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01", "x-request-id": f"mine-{name}"}
        return await self.client.post("/v1/completions", json=completion(prompt, **options), headers=headers)


@asynccontextmanager
async def site_of(graph: Graph) -> AsyncIterator[Site]:
    """Routed `always-remote`, over one prefill and one decode worker."""
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.0, step_s=0.002)
    coordinator = graph.start_coordinator("always-remote")
    graph.start_frontend()
    prefill = await graph.new_worker("prefill", perf, "--max-context-tokens", str(LIMIT_TOKENS))
    decode = await graph.new_worker("decode", perf, "--max-context-tokens", str(LIMIT_TOKENS))
    await graph.until_answers([coordinator])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        yield Site(graph, client, coordinator, prefill, decode)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(graph: Graph) -> AsyncIterator[Site]:
    graph.environment.update(DYN_LOGGING_JSONL="1", DYN_LOG="info", AMPD_LOG_ROUNDS="steps")
    async with site_of(graph) as site:
        yield site


async def test_a_local_and_a_remote_round_are_found_everywhere_by_the_client_s_trace_id(site: Site) -> None:
    first, second = uuid4().hex, uuid4().hex
    await site.round(PROMPT, first, "way", max_tokens=4, **LOCAL)
    placed = (await site.until_said(site.coordinator, {"round placed", "round finished"}, trace_id=first))[
        "round placed"
    ]
    assert (placed["route"], placed["reason"]) == ("local", "cannot-carry-presence-penalty")
    local = {"prefill queued", "prefill picked", "prefill done", "decode done"}
    await site.until_said(site.decode, local, trace_id=first)
    assert site.lines(site.prefill, trace_id=first) == []

    answer = (await site.round(PROMPT * 2, second, "way", max_tokens=8)).json()
    said = record(answer)
    assert (said["trace_id"], f"cmpl-{said['request_id']}") == (second, answer["id"])
    coordinator = await site.until_said(site.coordinator, {"round placed", "round finished"}, trace_id=second)
    end = coordinator["round finished"]
    assert (end["route"], end["output_tokens"], end["outcome"], end["retries"]) == ("remote", 8, "met", 0)
    assert (end["prefill_worker"], end["decode_worker"]) == (site.prefill_id, site.decode_id)
    assert coordinator["round placed"]["estimates"][0]["total_s"] == pytest.approx(
        said["estimates"][0]["total_s"], abs=1e-6
    )

    remote = {"prefill queued", "prefill picked", "prefill done", "KV read"}
    kv = {"KV lease", "KV unlease"}
    prefill = await site.until_said(site.prefill, remote | kv, trace_id=second)
    decode = await site.until_said(site.decode, {"KV read", "decode done"} | kv, trace_id=second)
    for reader, source, part in ((prefill, site.decode_id, "history"), (decode, site.prefill_id, "increment")):
        read = reader["KV read"]
        assert (read["part"], read["kv_source"]) == (part, source)
        assert (read["tokens"], read["bytes"]) == (said[f"kv_read_tokens_{part}"], said[f"kv_read_bytes_{part}"])
        assert read["tokens"] > 0
    assert {line["worker_id"] for line in prefill.values()} == {site.prefill_id}
    assert {line["worker_id"] for line in decode.values()} == {site.decode_id}
    assert {decode[message]["caller"] for message in kv} == {site.prefill_id}
    assert {prefill[message]["caller"] for message in kv} == {site.decode_id}
    ids = {"request_id": said["request_id"], "x_request_id": "mine-way", "session_id": "way"}
    for line in (*coordinator.values(), *prefill.values(), *decode.values()):
        assert line.items() >= ids.items()


async def test_rounds_at_the_same_time_keep_their_lines_apart(site: Site) -> None:
    traces = {f"apart-{number}": uuid4().hex for number in range(8)}
    for grown in (1, 2, 3):
        await asyncio.gather(
            *(
                # Tokens of its own, so that no round finds the KV of another.
                site.round([20 + number] * 48 * grown, trace_id, name, max_tokens=5, **(LOCAL if number % 3 else {}))
                for number, (name, trace_id) in enumerate(traces.items())
            )
        )
    for name, trace_id in traces.items():
        await until(lambda name=name: len(site.lines(site.coordinator, session_id=name)) >= 6)
        for process in (site.coordinator, site.prefill, site.decode):
            lines = site.lines(process)  # read once, because workers may still write
            by_trace = [line for line in lines if line.get("trace_id") == trace_id]
            assert by_trace == [line for line in lines if line.get("session_id") == name]
            assert {line["x_request_id"] for line in by_trace} <= {f"mine-{name}"}
    known = set(traces.values())
    tasks = [line for line in site.lines(site.prefill) if line.get("trace_id") in known and "task_id" in line]
    owners = {(line["task_id"], line["trace_id"]) for line in tasks}
    assert len(owners) == len({task_id for task_id, _ in owners}) > 3


async def test_the_end_of_a_session_is_found_where_its_kv_was(site: Site) -> None:
    trace_id = uuid4().hex
    headers = {**session("ends", final=True), "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    await site.client.post("/v1/completions", json=completion(PROMPT, max_tokens=3), headers=headers)
    said = await until(lambda: site.lines(site.decode, trace_id=trace_id, message="KV release_session"))
    assert [line["caller"] for line in said] == ["coordinator"]


async def test_an_error_quotes_the_ids_and_is_logged_with_them(site: Site) -> None:
    trace_id = uuid4().hex
    headers = {**session("long"), "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01", "x-request-id": "mine-long"}
    # Not a completion: without streaming, the frontend answers those that fail with a 500 of its own.
    body = chat(HELLO, max_tokens=3)
    schema = {"name": "x", "schema": {"type": "object"}}
    body["response_format"] = {"type": "json_schema", "json_schema": schema}
    answer = await site.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert answer.headers["x-request-id"] == "mine-long"
    (line,) = await until(lambda: [each for each in site.log(site.coordinator) if each["message"] == "round refused"])
    assert line.items() >= {"trace_id": trace_id, "session_id": "long", "status": 400}.items()
    assert f"(trace_id {trace_id}, request_id {line['request_id']}, x_request_id mine-long)" in answer.text


async def test_as_text_and_by_default_a_round_is_one_line_with_the_id_of_the_answer(
    tmp_path: Path, redis_server: EmbeddedRedis, fork_server: ForkServer
) -> None:
    with empty_graph(tmp_path, redis_server.url, fork_server) as graph:
        graph.environment.update(DYN_LOG="warn,router=info,workers=info")
        async with site_of(graph) as site:
            answer = (await site.round(PROMPT, uuid4().hex, "text", max_tokens=4)).json()
            said = record(answer)
            assert (said["trace_id"], f"cmpl-{said['request_id']}") == (None, answer["id"])
            end = f"request_id={said['request_id']} session_id=text"
            await until(lambda: end in graph.log(site.coordinator))
            logs = [graph.log(process) for process in (site.coordinator, site.prefill, site.decode)]
            found = [line for text in logs for line in text.splitlines() if said["request_id"] in line]
            assert len(found) == 1
            assert "round finished outcome=met route=remote" in found[0]
            assert end in found[0]
            body = completion(PROMPT, max_tokens=2, stream=True, nvext={"annotations": ["ttft_target:never"]})
            refused = await site.client.post("/v1/completions", json=body, headers=session("refused"))
            assert "ttft_target" in refused.text
            await until(lambda: "round refused" in graph.log(site.coordinator))
            (line,) = [line for line in graph.log(site.coordinator).splitlines() if "round refused" in line]
            assert "status=400" in line
            assert "request_id=" in line
