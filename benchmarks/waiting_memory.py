"""What each process of a graph holds for a round that waits with a long prompt.

    python -m benchmarks.waiting_memory [--tokens 100000] [--counts 8,24,40] [--text] [--json]

The graph has one process of each kind and modelled engines, whose first prefill takes longer than the measurement. So
all further rounds wait in the queue of the prefill worker. Nothing is refused for its wait (`--max-wait 0`): only
`--max-rounds` and the memory would bound the queue. Each round is the first of a session of its own, so that no two
prompts share a token.

After each count of waiting rounds the memory of all processes is read (RSS, without pages of files). What one round
costs is the slope between the first and the last count. The table compares the rounds that `--max-rounds` lets in with
the memory limits of `k8s/base/graph.yaml`: at a coordinator `--max-rounds`; at a frontend those of all coordinators,
because it may be the only one that clients reach; at a worker the same, because it may be the only one of its role.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import open_store
from benchmarks.graph_processes import CONTAINER_OF, MANIFEST, graph_processes, memory_limits
from benchmarks.overload import performance_model
from router.settings import CoordinatorSettings
from tools.demo import running_graph

_CONTEXT = 131_072
_FIRST_TOKEN, _LAST_TOKEN = 64, 250
_POLL_S, _PATIENCE_S = 0.25, 300.0
_SETTLE_S = 3.0
_MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; prints a Markdown table, or with `--json` one object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting_memory", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000, help="of each prompt")
    parser.add_argument("--counts", default="8,24,40", help="waiting rounds at which memory is read, comma-separated")
    parser.add_argument("--text", action="store_true", help="prompts are text of about as many tokens, as chats")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(argv)
    counts = [int(count) for count in options.counts.split(",")]
    with tempfile.TemporaryDirectory(prefix="ampd-waiting-") as name, EmbeddedRedis() as redis:
        profile = Path(name) / "profile.json"
        profile.write_text(json.dumps(performance_model()), encoding="utf-8")
        flags = [
            "--engine",
            "modelled",
            "--port",
            "0",
            "--perf",
            str(profile),
            "--prefill",
            "1",
            "--decode",
            "1",
            "--pools",
            "static",
        ]
        flags += ["--routing", "always-remote", "--max-wait", "0", "--log-dir", name, "--state-url", redis.url]
        flags += ["--router-args", f"--context-length {_CONTEXT}"]
        flags += ["--worker-args", f"--max-context-tokens {_CONTEXT} --kv-capacity-tokens {4 * _CONTEXT}"]
        with running_graph(flags, lambda line: print(line, file=sys.stderr)) as url:
            seen = asyncio.run(_measure(url, redis.url, counts, options))
    result = {"tokens": options.tokens, "counts": counts, "bytes": seen, "rows": rows(counts, seen)}
    print(json.dumps(result, indent=1) if options.json else table(result))
    return 0


async def _measure(
    url: str, state_url: str, counts: Sequence[int], options: argparse.Namespace
) -> list[dict[str, int]]:
    store = await open_store(state_url, "ampd")
    limits = httpx.Limits(max_connections=None)
    rounds: list[asyncio.Task[Any]] = []
    seen = []
    try:
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
            for count in counts:
                while len(rounds) <= count:  # one more, because the first one runs
                    rounds.append(asyncio.create_task(_round(client, len(rounds), options)))
                    await _until_queued(store, len(rounds), rounds)
                await asyncio.sleep(_SETTLE_S)
                seen.append(memory())
                print(f"{count} waiting: {seen[-1]}", file=sys.stderr)
            for each in rounds:
                each.cancel()
            await asyncio.gather(*rounds, return_exceptions=True)
    finally:
        await store.close()
    return seen


async def _round(client: httpx.AsyncClient, number: int, options: argparse.Namespace) -> None:
    rng = random.Random(number)
    path, body = "/v1/completions", {"model": "tiny", "max_tokens": 4, "stream": True}
    if options.text:
        words = " ".join(f"{rng.randrange(10**6):x}" for _ in range(options.tokens // 6))
        path, body = "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": words}]}
    else:
        body["prompt"] = [rng.randint(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(options.tokens)]
    reply = await client.post(path, json=body, headers={"x-dynamo-session-id": f"waits-{number}"})
    raise AssertionError(f"round {number} ended with {reply.status_code}: {reply.text[:300]}")


async def _until_queued(store: Any, count: int, rounds: Sequence[asyncio.Task[Any]]) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while sum(view.queued_prefills for view in await store.snapshot()) < count:
            for each in rounds:
                if each.done():
                    each.result()
            await asyncio.sleep(_POLL_S)


def memory() -> dict[str, int]:
    """Kind of process -> bytes of its own memory, without pages of files."""
    found = {}
    for kind, pid in graph_processes():
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
        found[kind] = int(lines["RssAnon"].split()[0]) * 1024
    return found


def rows(counts: Sequence[int], seen: Sequence[dict[str, int]]) -> list[dict[str, Any]]:
    """A row per kind of process: its cost per round, and what it has with all rounds that `--max-rounds` lets in."""
    most = int(CoordinatorSettings.model_fields["max_rounds"].default)
    components = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))["spec"]["components"]
    (coordinators,) = (each["replicas"] for each in components if each["name"] == "coordinator")
    limits = memory_limits()
    found = []
    for kind in seen[0]:
        per_round = (seen[-1][kind] - seen[0][kind]) / (counts[-1] - counts[0])
        idle = seen[0][kind] - per_round * counts[0]
        held = most if kind == "coordinator" else most * coordinators
        found.append(
            {
                "kind": kind,
                "idle_mib": idle / _MIB,
                "per_round_mib": per_round / _MIB,
                "rounds": held,
                "with_all_mib": (idle + held * per_round) / _MIB,
                "limit_mib": limits[kind] / _MIB if kind in limits else None,
                "container": CONTAINER_OF.get(kind, kind),
            }
        )
    return found


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = ["| process | without rounds (MiB) | per waiting round (MiB) | rounds | with all (MiB) | limit (MiB) |"]
    lines.append("| --- " * 6 + "|")
    for row in result["rows"]:
        limit = f"{row['limit_mib']:,.0f}" if row["limit_mib"] else f"in that of the {row['container']}"
        cells = (row["kind"], f"{row['idle_mib']:,.0f}", f"{row['per_round_mib']:.2f}", f"{row['rounds']:,}")
        lines.append(f"| {' | '.join(cells)} | {row['with_all_mib']:,.0f} | {limit} |")
    lines.append(f"\n{result['tokens']:,} tokens per prompt; load {os.getloadavg()[0]:.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
