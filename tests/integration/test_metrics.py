"""What a whole graph's processes expose on their system ports agrees with the decision records that clients got."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx
import pytest
import pytest_asyncio
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from ampd.cli.serve.graph import system_environment
from ampd.keys import MAX_SESSION_ID_CHARS
from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.names import METRICS, Kind, Process
from ampd.tiny_model import tiny_model_path
from tests.harness.graph import HELLO, SHORT_LEASE, Graph, chat, completion, profile, record, session
from tests.harness.ports import free_ports
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

HOST = "127.0.0.1"
CAPACITY = 6000
NEVER_IN_THIS_GRAPH = {names.ROLE_ASSIGNMENTS.name}
"""Their names are exposed, without a value: nobody assigns roles where the pools are static."""


class Scraped:
    """The metrics of several processes, one text each."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.families: dict[str, list[Family]] = {
            name: list(text_string_to_metric_families(text)) for name, text in texts.items()
        }

    def total(self, sample_name: str, **labels: str) -> float:
        """The sum over all processes and over all labels that are not named."""
        return sum(sample.value for sample in self.samples(sample_name) if labels.items() <= sample.labels.items())

    def samples(self, sample_name: str) -> list[Any]:
        return [
            sample
            for families in self.families.values()
            for family in families
            for sample in family.samples
            if sample.name == sample_name
        ]


class Site:
    """A graph whose processes have system ports.

    Attributes:
        ports: process name -> system port.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ports: dict[str, int] = {}
        self.perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.02, step_s=0.002)

    def with_port(self, start: Callable[[], str]) -> str:
        """Start a process that has a system port; its name."""
        (port,) = free_ports(1)
        self.graph.environment |= system_environment(HOST, port)
        name = start()
        self.ports[name] = port
        return name

    def worker(self, role: str) -> str:
        """Start a worker; decode workers have little KV memory, and one of them is killed."""
        small = ("--kv-capacity-tokens", str(CAPACITY), "--kv-store-tokens", str(CAPACITY), *SHORT_LEASE)
        flags = small if role == "decode" else ()
        return self.with_port(lambda: self.graph.start_worker(role, self.perf, *flags))

    async def get(self, name: str, path: str) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.get(f"http://{HOST}:{self.ports[name]}{path}", timeout=PATIENCE_S)

    async def until_ready(self, name: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    if (await self.get(name, "/health")).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                assert name not in self.graph.supervisor.ended(), self.graph.supervisor.ended()
                await asyncio.sleep(0.05)

    async def scrape(self) -> Scraped:
        return Scraped({name: (await self.get(name, "/metrics")).text for name in self.ports})

    async def until(self, condition: Callable[[Scraped], bool]) -> Scraped:
        """A round is counted when its last chunk has left: a moment after its client has it."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(scraped := await self.scrape()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return scraped


@pytest.fixture(scope="module")
def site(graph: Graph) -> Site:
    return Site(graph)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(site: Site) -> AsyncIterator[httpx.AsyncClient]:
    """Routed `always-remote`, over a prefill worker and two decode workers with little KV memory."""
    graph = site.graph
    coordinator = site.with_port(lambda: graph.start_coordinator("always-remote", "--ttft", "60", "--itl", "10"))
    await site.until_ready(coordinator)
    alone = await site.scrape()
    assert alone.total("ampd_live_workers") == 0
    assert len(alone.samples("ampd_live_workers")) == 3, "a coordinator without workers is well, and says so"
    graph.environment |= system_environment(HOST, None)
    graph.start_frontend()
    workers = [site.worker("prefill"), site.worker("decode"), site.worker("decode")]
    for name in workers:
        await site.until_ready(name)
    await graph.until_workers(3)
    await graph.until_answers([coordinator])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as http:
        yield http


async def ask(client: httpx.AsyncClient, name: str, prompt: list[int], **options: Any) -> dict[str, Any]:
    """One round of a session; its decision record as the answer has it."""
    reply = await client.post("/v1/completions", json=completion(prompt, **options), headers=session(name))
    assert reply.status_code == 200, reply.text
    return record(reply.json())


async def test_counts_equal_the_decision_records(client: httpx.AsyncClient, site: Site) -> None:
    before = await site.scrape()

    async def talk(number: int) -> list[dict[str, Any]]:
        """Remote, then local (because of a penalty), then remote with a history that was computed elsewhere."""
        name, prompt, records = f"talk-{number}", [7 + number] * 150, []
        for options in ({}, {"presence_penalty": 0.5}, {}, {"presence_penalty": 0.5}):
            records.append(await ask(client, name, prompt, max_tokens=6, **options))
            prompt = prompt + [8 + number] * 60
        return records

    records = [decision for talked in await asyncio.gather(*map(talk, range(4))) for decision in talked]
    rounds = before.total("ampd_rounds_total") + len(records)
    after = await site.until(lambda scraped: scraped.total("ampd_rounds_total") >= rounds)

    def rise(sample_name: str, **labels: str) -> float:
        return after.total(sample_name, **labels) - before.total(sample_name, **labels)

    assert rise("ampd_rounds_total") == len(records) == 16
    assert rise("ampd_rounds_total", outcome="met") == 16
    for (route, reason), count in Counter((decision["route"], decision["reason"]) for decision in records).items():
        assert rise("ampd_routes_total", route=route, reason=reason) == count
    assert {decision["reason"] for decision in records} == {"always-remote", "cannot-carry-presence-penalty"}
    assert rise("ampd_routes_total") == 16
    assert rise("ampd_sessions_bound_total") == 4
    assert rise("ampd_time_to_first_token_seconds_count", prefill="initial", route="remote") == 4
    assert rise("ampd_time_to_first_token_seconds_count", prefill="incremental", route="remote") == 4
    assert rise("ampd_time_to_first_token_seconds_count", prefill="incremental", route="local") == 8
    assert rise("ampd_time_to_first_token_seconds_sum") == pytest.approx(
        sum(decision["ttft_s"] for decision in records)
    )
    assert rise("ampd_inter_token_latency_seconds_count") == 16
    for part in ("history", "increment"):
        for what in ("bytes", "tokens"):
            read = sum(decision[f"kv_read_{what}_{part}"] for decision in records)
            assert read > 0
            assert rise(f"ampd_kv_read_{what}_total", direction=part) == read
        # Tries that read nothing in time count too.
        reads = [decision[f"kv_read_s_{part}"] for decision in records if decision[f"kv_read_s_{part}"]]
        assert rise("ampd_kv_read_seconds_count", direction=part) == len(reads)
        assert rise("ampd_kv_read_seconds_sum", direction=part) == pytest.approx(sum(reads))
        short = {"history": "hist", "increment": "incr"}[part]
        assert rise("ampd_prompt_tokens_total", part=part) == sum(decision[f"{short}_tokens"] for decision in records)
    assert rise("ampd_kv_read_failures_total") == 0
    reload_s = sum(decision["kv_reload_s"] for decision in records)
    assert reload_s > 0
    assert rise("ampd_kv_reload_seconds_sum") == pytest.approx(reload_s)
    assert all(decision["cached_tokens"] == sum(decision["hit_tokens"].values()) for decision in records), (
        "nothing is recomputed"
    )
    assert rise("ampd_output_tokens_total") == 16 * 6
    assert rise("ampd_prefill_seconds_count") == 16
    assert rise("ampd_prefill_seconds_sum") == pytest.approx(sum(decision["prefill_s"] for decision in records))
    # Remote: all tokens but the first are made there; local: the first has nothing before it.
    assert rise("ampd_token_gap_seconds_count") == 16 * 5
    # The first round of each session waits for a write of its own. Later ones are written together.
    assert 4 < rise("ampd_state_round_trips_total", operation="route") <= 16
    assert rise("ampd_state_round_trip_seconds_total", operation="route") > 0
    assert rise("ampd_state_errors_total") == 0


async def test_gauges_say_how_it_is(client: httpx.AsyncClient, site: Site) -> None:
    for name in ("one", "two"):
        await ask(client, name, [9] * 200, max_tokens=3)
    now = await site.until(
        lambda scraped: (
            scraped.total("ampd_rounds_in_progress") == 0 and scraped.total("ampd_live_workers", role="decode") == 2
        )
    )
    assert now.total("ampd_live_workers", role="prefill") == 1
    assert now.total("ampd_worker_role", role="decode") == 2
    assert now.total("ampd_worker_role", role="prefill") == 1
    assert now.total("ampd_worker_role") == 3
    assert now.total("ampd_state_available") == 4, "of every process"
    assert now.total("ampd_slo_time_to_first_token_seconds") == 60
    assert now.total("ampd_slo_inter_token_latency_seconds") == 10
    assert now.total("ampd_coordinator_info", routing="always-remote", pools="static") == 1
    assert now.total("ampd_worker_info", engine="modelled", tp="1") == 3
    assert now.total("ampd_sessions_held") > 0
    assert now.total("ampd_kv_store_used_tokens") >= now.total("ampd_kv_pinned_tokens") > 0
    assert 0 <= now.total("ampd_state_view_age_seconds") < 60
    views = {view.worker_id: view for view in await site.graph.until_workers(3)}
    held = {sample.labels["worker_id"]: sample.value for sample in now.samples("ampd_kv_capacity_tokens")}
    assert held == {worker_id: view.kv_capacity_tokens for worker_id, view in views.items()}, "Dynamo's instance ids"


async def test_every_name_is_exposed_with_its_kind_help_and_labels(client: httpx.AsyncClient, site: Site) -> None:
    await ask(client, "every", [9] * 100, max_tokens=3)
    now = await site.scrape()
    for name, families in now.families.items():
        process = Process.COORDINATOR if name.startswith("coordinator") else Process.WORKER
        ours = {family.name: family for family in families if family.name.startswith("ampd_")}
        assert ours.keys() == {metric.family for metric in METRICS if process in metric.processes}
        for metric in METRICS:
            if process in metric.processes:
                family = ours[metric.family]
                assert (family.type, family.documentation) == (metric.kind, metric.help)
                assert family.samples or metric.name in NEVER_IN_THIS_GRAPH, metric.name
                for sample in family.samples:
                    assert sample.labels["dynamo_namespace"] == site.graph.namespace
                    assert sample.labels["dynamo_component"] in ("coordinator", "worker")
                    own = sample.labels.keys() & metric.labels.keys()
                    assert own == metric.labels.keys()
                    assert "le" not in sample.labels or metric.kind is Kind.HISTOGRAM
                    assert all(sample.labels[label] in values for label, values in metric.labels.items() if values), (
                        sample
                    )
        assert any(family.name.startswith("dynamo_component") for family in families), "Dynamo's own stay"
        duplicates = [
            (sample.name, *sorted(sample.labels.items())) for exposed in ours.values() for sample in exposed.samples
        ]
        assert len(set(duplicates)) == len(duplicates)


async def test_all_processes_are_well(client: httpx.AsyncClient, site: Site) -> None:  # noqa: ARG001
    for name in site.ports:
        for path in ("/health", "/live"):
            assert (await site.get(name, path)).status_code == 200


async def test_what_clients_get_wrong_is_counted_by_its_status(client: httpx.AsyncClient, site: Site) -> None:
    before = await site.scrape()
    headers = session("x" * (MAX_SESSION_ID_CHARS + 1))
    reply = await client.post("/v1/chat/completions", json=chat(HELLO, max_tokens=3), headers=headers)
    assert reply.status_code == 400, reply.text
    after = await site.until(lambda scraped: scraped.total("ampd_round_failures_total", status="400") > 0)
    assert after.total("ampd_round_failures_total") == before.total("ampd_round_failures_total") + 1
    assert after.total("ampd_rounds_total") == before.total("ampd_rounds_total"), "it never was a round"


@pytest.mark.long
async def test_a_session_that_makes_room_for_others_is_lost(client: httpx.AsyncClient, site: Site) -> None:
    before = await site.scrape()
    evicted = before.total("ampd_sessions_lost_total", reason="evicted")
    number = 0
    async with asyncio.timeout(PATIENCE_S):
        while (await site.scrape()).total("ampd_sessions_lost_total", reason="evicted") == evicted:
            await ask(client, f"big-{number}", [11 + number] * 1900, max_tokens=2)
            number += 1
    assert 2 < number < 30
    assert (await site.scrape()).total("ampd_sessions_lost_total", reason="worker-lost") == 0


async def test_a_lost_worker_its_session_and_a_read_from_it(client: httpx.AsyncClient, site: Site) -> None:
    victim = (await ask(client, "moved", [13] * 300, max_tokens=4))["decode_worker"]
    before = await site.scrape()
    ports = {sample.labels["worker_id"] for sample in before.samples("ampd_worker_info")}
    assert victim in ports
    for name, families in before.families.items():
        if any(sample.labels.get("worker_id") == victim for family in families for sample in family.samples):
            lost = name
    del site.ports[lost]
    rest = await site.scrape()
    await site.graph.end(lost, signal.SIGKILL)
    after_death = await ask(client, "moved", [13] * 320, max_tokens=4)
    assert after_death["decode_worker"] != victim
    now = await site.until(lambda scraped: scraped.total("ampd_live_workers", role="decode") == 1)
    assert now.total("ampd_sessions_repinned_total") == rest.total("ampd_sessions_repinned_total") + 1
    assert now.total("ampd_sessions_lost_total", reason="worker-lost") == now.total("ampd_sessions_repinned_total")
    now = await site.until(lambda scraped: scraped.total("ampd_rounds_total") > rest.total("ampd_rounds_total"))
    assert now.total("ampd_round_retries_total") >= rest.total("ampd_round_retries_total")
    last = site.worker("decode")
    await site.until_ready(last)
    await site.until(lambda scraped: scraped.total("ampd_live_workers", role="decode") == 2)


async def test_a_port_that_is_taken_costs_the_metrics_and_nothing_else(client: httpx.AsyncClient, site: Site) -> None:
    with socket.create_server((HOST, free_ports(1)[0])) as taken:
        port = taken.getsockname()[1]
        site.graph.environment |= system_environment(HOST, port)
        name = site.graph.processes[await site.graph.new_worker("decode", site.perf)]
        lines = [line for line in site.graph.log(name).splitlines() if "no metrics" in line]
        assert len(lines) == 1
        assert f"port {port} is taken; set DYN_SYSTEM_PORT to a free one" in lines[0]
        assert name not in site.graph.supervisor.ended()
        await site.graph.end(name)
    assert (await ask(client, "after", [9] * 50, max_tokens=2))["route"] == "remote"


@pytest.mark.parametrize("module", ["router", "workers"])
async def test_a_port_that_dynamo_cannot_read_is_refused_in_one_line(module: str, site: Site) -> None:
    flags = ["--model", str(tiny_model_path()), "--perf", "tiny-cpu"]
    if module == "workers":
        flags += ["--engine", "modelled", "--role", "decode"]
    environment = {**os.environ, **site.graph.environment, "DYN_SYSTEM_PORT": "40000"}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", module, *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert "DYN_SYSTEM_PORT=40000" in line
    assert "Traceback" not in done.stderr
