"""What the coordinator costs: TTFT, requests a second and CPU, against the frontend calling the worker itself.

    python -m benchmarks.coordinator_overhead [--json] [--sessions] [--status-relay] [--against FOLDER]
    python -m benchmarks.coordinator_overhead --step-ms 20 --concurrency 32 --stream-tokens 1 4 16

Graphs run side by side on this machine: frontend -> coordinator -> worker (local route), the same with a coordinator
that hands no round on, so that all tokens pass it (the pipe), and frontend -> worker. The workers run the modelled
engine with times of zero, so that what is measured is the way, not the model. Bursts of requests go to one graph after
the other; medians over the bursts are printed. Every request opens a connection of its own: on a kept-alive one the end
of a stream waits some 40 ms for a delayed acknowledgement.

The CPU time of each process per token is that of long answers, less that of as many short ones, by the tokens between
them. What short answers take besides their tokens is the CPU time per round. Without `--step-ms` the tokens come as
fast as the processes pass them on, and one that is behind joins them. With it, they come at the pace of an engine.

With several values of `--stream-tokens` there is a graph with a coordinator for each of them. `--against FOLDER` adds a
graph with a coordinator and a worker of another checkout, for changes of the code. `--status-relay` measures the first
graph with a coordinator through a second frontend too, which has the status relay before it, as those of `ampd serve`
have. Its frontend, coordinator and worker are measured again during these bursts.

A refused request ends the measurement with one line that says why, because a burst with refusals measures less work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ampd.child_process import exit_now
from ampd.cli.serve.command import Expected, wait_until_ready
from ampd.cli.serve.graph import Frontend, dynamo_environment
from ampd.cli.serve.processes import ProcessSpec, Supervisor, python_module
from ampd.cli.serve.settings import claim_port
from ampd.errors import guarded
from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import open_store
from ampd.tiny_model import tiny_model_path
from ampd.types import Role
from benchmarks import overhead_tables
from benchmarks.circumstances import circumstances, in_words
from benchmarks.timed_stream import timed_stream

_MODEL = "tiny"
_STATUS = overhead_tables.STATUS
_START_S = 300.0


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst: `concurrency` clients that send one request after the other."""

    ttft_s: float
    total_s: float
    requests_per_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--requests", type=int, default=100, help="requests per burst")
    parser.add_argument("--bursts", type=int, default=7, help="bursts per graph and concurrency")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--long-tokens", type=int, default=200, help="output tokens of a long answer")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of a decode step")
    parser.add_argument(
        "--stream-tokens", type=int, nargs="+", default=[1], metavar="N", help="tokens that a worker sends together"
    )
    parser.add_argument("--sessions", action="store_true", help="name sessions: each client has its own, of ten rounds")
    parser.add_argument("--status-relay", action="store_true", help="measure a frontend behind the status relay, too")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="measure the code of another checkout, too")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--direct-worker", metavar="NAMESPACE", help=argparse.SUPPRESS)
    parser.add_argument("--pipe", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--perf", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.direct_worker:
        return _serve_direct(options.direct_worker, options.perf)
    if options.pipe:
        return _serve_pipe(options.pipe)
    now = circumstances()
    results = now | asyncio.run(_measure(options))
    if options.json:
        print(json.dumps(results))
        return 0
    print(f"{in_words(now)}\n")
    print("\n\n".join(table(results) for table in (overhead_tables.times, overhead_tables.cpu, overhead_tables.aims)))
    return 0


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as redis:
        supervisor = Supervisor(Path(folder))
        try:
            urls = await _start(Path(folder), redis.url, supervisor, options)
            return await _alternate(options, urls, _measured(supervisor.pids, options))
        finally:
            supervisor.stop()


async def _start(folder: Path, redis_url: str, supervisor: Supervisor, options: argparse.Namespace) -> dict[str, str]:
    model, profile = str(tiny_model_path()), folder / "instant.json"
    profile.write_text(json.dumps(_instant(options.step_ms / 1e3)))
    env = {**dynamo_environment(folder / "discovery"), "DYN_LOG": "error"}
    grouped = {_graph(tokens): tokens for tokens in options.stream_tokens}
    if options.against:
        grouped["against"] = options.stream_tokens[0]
    grouped["pipe"] = options.stream_tokens[0]
    others = (_STATUS,) if options.status_relay else ()
    ports = {name: claim_port("127.0.0.1", 0) for name in (*grouped, *others, "without")}
    own = "benchmarks.coordinator_overhead"
    direct = python_module(own, ["--perf", str(profile), "--direct-worker", "without"])
    specs = [ProcessSpec("worker-without", direct, env)]
    for name, tokens in grouped.items():
        of_graph = {**env, **(_only(options.against) if name == "against" else {})}
        shared = ["--dyn-namespace", name, "--state-url", redis_url, "--perf", str(profile), "--model", model]
        flags = ["--role", "decode", "--engine", "modelled", "--eos-every-tokens", "0", "--stream-tokens", str(tokens)]
        specs.append(ProcessSpec(f"worker-{name}", python_module("workers", [*flags, *shared]), of_graph))
        flags = ["--model-name", _MODEL, *shared]
        coordinator = python_module(own, ["--pipe", *flags]) if name == "pipe" else python_module("router", flags)
        specs.append(ProcessSpec(f"coordinator-{name}", coordinator, of_graph))
    namespaces = {name: _graph(options.stream_tokens[0]) if name == _STATUS else name for name in ports}
    for name, port in ports.items():
        frontend = Frontend("127.0.0.1", port, namespaces[name], status_relay=name == _STATUS)
        specs.append(frontend.process(f"frontend-{name}", env))
    for spec in specs:
        supervisor.start(spec)
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    for name, url in urls.items():
        store = await open_store(redis_url, namespaces[name])
        expected, coordinators = ({Role.DECODE: 1}, 1) if namespaces[name] in grouped else ({}, 0)
        await wait_until_ready(
            store, Expected(url, _MODEL, expected, coordinators), supervisor.ended, _START_S, lambda _: None
        )
        await store.close()
    return urls


def _only(folder: Path) -> dict[str, str]:
    """The environment in which Python imports from this checkout, wherever this process runs."""
    return {"PYTHONPATH": str(folder.resolve()), "PYTHONSAFEPATH": "1"}


def _graph(stream_tokens: int) -> str:
    """The name of a graph with a coordinator, which is its namespace."""
    return "with" if stream_tokens == 1 else f"with-{stream_tokens}"


async def _alternate(options: argparse.Namespace, urls: dict[str, str], pids: dict[str, int]) -> dict[str, Any]:
    """By number of clients: times of each graph, with short answers, and CPU times of each process."""
    lengths = {name: getattr(options, name) for name in ("prompt_tokens", "output_tokens", "long_tokens")}
    results: dict[str, Any] = {**lengths}
    for concurrency in options.concurrency:
        bursts: dict[str, list[Burst]] = {name: [] for name in urls}
        each: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}
        for number in range(options.bursts + 1):
            for graph, url in urls.items():
                own = {name: pid for name, pid in pids.items() if name.partition("-")[2] == graph}
                burst, short = await _costs(options, url, concurrency, 2 * number, own)
                answers = argparse.Namespace(**{**vars(options), "output_tokens": options.long_tokens})
                _, long = await _costs(answers, url, concurrency, 2 * number + 1, own)
                if number:  # the first one warms up
                    bursts[graph].append(burst)
                    for name in own:
                        each[name].append(split_cpu_us(short[name], long[name], options))
        results[f"times_{concurrency}"] = {name: _medians(values) for name, values in bursts.items()}
        results[f"concurrency_{concurrency}"] = {
            name: dict(zip(("token_us", "round_us"), map(statistics.median, zip(*values, strict=True)), strict=True))
            for name, values in each.items()
        }
    return results


async def _costs(
    options: argparse.Namespace, url: str, concurrency: int, number: int, own: dict[str, int]
) -> tuple[Burst, dict[str, float]]:
    """A burst, and the CPU time in seconds that each process took for it."""
    before = _cpu_s(own)
    burst = await _burst(options, url, concurrency, number)
    return burst, {name: after - before[name] for name, after in _cpu_s(own).items()}


def _medians(bursts: list[Burst]) -> dict[str, float]:
    return {
        "ttft_s": statistics.median(burst.ttft_s for burst in bursts),
        "total_s": statistics.median(burst.total_s for burst in bursts),
        "requests_per_s": statistics.median(burst.requests_per_s for burst in bursts),
    }


def _measured(pids: dict[str, int], options: argparse.Namespace) -> dict[str, int]:
    """The processes of each graph: part and graph -> process id. The graph behind the status relay shares some."""
    if not options.status_relay:
        return pids
    shared = {
        f"{part}-{_STATUS}": pids[f"{part}-{_graph(options.stream_tokens[0])}"] for part in ("coordinator", "worker")
    }
    relay = pids[f"frontend-{_STATUS}"]
    (frontend,) = psutil.Process(relay).children()
    return {**pids, **shared, f"{overhead_tables.RELAY}-{_STATUS}": relay, f"frontend-{_STATUS}": frontend.pid}


def split_cpu_us(short_s: float, long_s: float, options: argparse.Namespace) -> tuple[float, float]:
    """(CPU time per token, per round without its tokens) in us, from the times of a burst of short and of long answers.

    Args:
        options: how many `requests` each burst has, with `output_tokens` and `long_tokens` each.
    """
    token_s = (long_s - short_s) / options.requests / (options.long_tokens - options.output_tokens)
    return 1e6 * token_s, 1e6 * (short_s / options.requests - token_s * options.output_tokens)


def _cpu_s(pids: dict[str, int]) -> dict[str, float]:
    # The clock of another process's CPU time, in nanoseconds (`clock_getcpuclockid`). /proc counts in steps of 10 ms.
    return {name: time.clock_gettime(~pid << 3 | 2) for name, pid in pids.items()}


async def _burst(options: argparse.Namespace, url: str, concurrency: int, number: int) -> Burst:
    left = iter(range(options.requests))
    times: list[tuple[float, float]] = []

    async def client(own: int) -> None:
        for rounds, request in enumerate(left):
            base = number * 1_000_003 + (own * options.requests + rounds // 10 if options.sessions else request)
            headers = f"x-dynamo-session-id: s{base}\r\n" if options.sessions else ""
            prompt = [5 + (base * 7919 + position * 31) % 700 for position in range(options.prompt_tokens)]
            body = {"model": _MODEL, "prompt": prompt, "max_tokens": options.output_tokens, "stream": True}
            times.append(await timed_stream(url, body, headers))

    start_s = time.perf_counter()
    await asyncio.gather(*(client(own) for own in range(concurrency)))
    wall_s = time.perf_counter() - start_s
    return Burst(
        ttft_s=statistics.median(ttft_s for ttft_s, _ in times),
        total_s=statistics.median(total_s for _, total_s in times),
        requests_per_s=len(times) / wall_s,
    )


def _instant(step_s: float) -> dict[str, Any]:
    """A performance model in which nothing takes time but a decode step."""
    nothing = {"alpha_s": 0, "beta_s_per_token": 0}
    head = {"kind": "rough", "source": "benchmark", "model": "none", "gpu": "none", "date": "2026-01-01", "method": "0"}
    return {
        "format": "ampd-performance-model/1",
        "provenance": head,
        "workers": [
            {
                "tp": 1,
                "prefill": {"segments": [{"from_incr_tokens": 0, "gamma_s_per_token2": 0, **nothing}]},
                "decode": {
                    "context_s_per_token": 0,
                    "segments": [{"from_batch": 0, "alpha_s": step_s, "beta_s_per_sequence": 0}],
                },
            }
        ],
        "kv_transfers": [{"tp_source": 1, "tp_target": 1, "segments": [{"from_tokens": 0, **nothing}]}],
        "kv_bytes_per_token": 64,
    }


def _serve_direct(namespace: str, profile: Path) -> int:
    """A worker without queue, state or coordinator, with the same engine, which the frontend calls."""
    import uvloop
    from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
    from dynamo.runtime import dynamo_worker

    from ampd.perf.piecewise import PiecewiseModel
    from ampd.perf.profile import PerformanceProfile
    from ampd.types import Parallelism
    from workers.engines.base import EngineRequest
    from workers.engines.modelled import ModelledEngine
    from workers.engines.modelled_tokens import read_model_folder
    from workers.round_service import chunk_of

    model = PiecewiseModel(PerformanceProfile.model_validate_json(profile.read_text()))

    @dynamo_worker()  # type: ignore[untyped-decorator]
    async def serve(runtime: Any) -> None:
        engine = ModelledEngine(read_model_folder(tiny_model_path()), model, Parallelism(), 262_144, 1_048_576)
        await engine.start()

        async def generate(request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
            limit = request["stop_conditions"].get("max_tokens")
            call = EngineRequest(context.id(), context.id(), request["token_ids"], limit, request)
            async for output in engine.generate(call):
                yield chunk_of(output)

        endpoint = runtime.endpoint(f"{namespace}.worker.generate")
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            str(tiny_model_path()),
            _MODEL,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=16,
        )
        await endpoint.serve_endpoint(generate)

    uvloop.run(serve())
    return 0


def _serve_pipe(arguments: list[str]) -> int:
    """A coordinator that hands no round on."""
    from router import frames
    from router.__main__ import main as serve_coordinator

    async def start(_server: frames.FrameServer, _runtime: Any, _namespace: str) -> None:
        """Leave all to Dynamo's server."""

    frames.FrameServer.start = start  # type: ignore[assignment, method-assign]
    return serve_coordinator(arguments)


if __name__ == "__main__":
    exit_now(guarded(main))
