"""What the KV store costs and saves, on a real SGLang engine with a tiny model on the CPU.

    python -m benchmarks.kv_store [decode] [sessions] [restart] [--json] [--sessions 300] [--context-tokens 20000]
        [--tp 2]

`decode`: a long decode, while short requests come and go beside it: requests of sessions, whose KV is written to the
store, or requests of no session, which are not stored. Both follow each other in pairs of random order on one engine.
`ratio` is the median over the pairs of the time per decode step, stored over not stored. `cpu_ratio` is the same of the
processor time of all processes of the worker, which other programs on the machine disturb less; it counts the copies
even where a core is free for them, so it bounds the cost from above.
`sessions`: sessions of 8 rounds take turns on a device pool that holds 20 of them. Tokens of the prompts by where they
came from, with the store and without. `recomputed` is history that the engine had computed in an earlier round;
`new` has the increments, and the tail of the history that does not fill a page.
`restart`: the engine's processes are killed between rounds and start again over the same store. `ratio` is the TTFT of
the next round over that of a prompt of the same length whose KV is not stored, medians. Its model is wider than that
of the other parts (hidden size 1536, 2 heads), because SGLang's attention on the CPU computes the queries of the whole
context even where only the last tokens are new: at 20,000 tokens it would take most of the time of a narrow model,
loaded or not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

from ampd.tiny_model import TinyModel, make_tiny_model
from tests.harness.forked_engines import forked_engines
from tests.workers.kv.store.store_lab import forget_all, session_ids
from workers.engines import sglang_request
from workers.engines.base import EngineOutput, EngineRequest
from workers.engines.sglang import SglangEngine, SglangSettings
from workers.engines.sglang_settings import Device

NARROW = TinyModel(layers=2, hidden_size=128, heads=4, kv_heads=2)
WIDE = TinyModel(layers=2, hidden_size=1536, heads=2, kv_heads=1)
PAGE = 16
GREEDY = {"sampling_options": {"temperature": 0.0}, "stop_conditions": {"ignore_eos": True}}
ROUNDS = 8
FIRST_TOKENS, INCREMENT_TOKENS, OUTPUT_TOKENS = 160, 32, 4
SESSION_TOKENS = FIRST_TOKENS + (ROUNDS - 1) * INCREMENT_TOKENS + ROUNDS * OUTPUT_TOKENS
RESIDENT_SESSIONS = 20
STEPS, BESIDE, BESIDE_TOKENS = 128, 4, 512
SETTLE_S = 30.0
CONCURRENT = 4

_by_tier: Counter[str] = Counter()
"""Cached tokens of all finished requests, by SGLang's names of where they were."""


def count_tiers() -> None:
    """Let SGLang's own counts of cached tokens by tier reach this benchmark."""
    original = sglang_request.output_of

    def output_of(part: Any, request: EngineRequest, index: int) -> EngineOutput | None:
        if part["meta_info"].get("finish_reason"):
            _by_tier.update({k: int(v) for k, v in (part["meta_info"].get("cached_tokens_details") or {}).items() if v})
        return original(part, request, index)

    sglang_request.output_of = output_of


def text(rng: random.Random, length: int) -> list[int]:
    """Random plain tokens."""
    return [rng.randrange(10, 600) for _ in range(length)]


async def play(engine: SglangEngine, session: str, prompt: list[int], new: int) -> tuple[list[int], float, float, int]:
    """One request: its tokens, TTFT in seconds, seconds per further step, cached tokens."""
    tokens: list[int] = []
    started_s = first_s = time.perf_counter()
    cached = 0
    async with aclosing(cast(Any, engine.generate(EngineRequest(uuid4().hex, session, prompt, new, GREEDY)))) as parts:
        async for part in parts:
            if not tokens:
                first_s = time.perf_counter()
            tokens += part.token_ids
            cached = max(cached, part.cached_tokens)
    return tokens, first_s - started_s, (time.perf_counter() - first_s) / max(1, new - 1), cached


async def decode(engine: SglangEngine, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step of a decode beside requests that are stored, and beside others."""
    rng = random.Random(1)
    pairs: list[dict[bool, Decode]] = []
    for _ in range(arguments.repeats + 1):
        pair = {is_stored: await one_decode(engine, rng, is_stored) for is_stored in rng.sample((True, False), 2)}
        assert pair[True].stored_tokens >= BESIDE * BESIDE_TOKENS > pair[False].stored_tokens == 0, pair
        pairs.append(pair)
    del pairs[0]  # it warms up
    ratios = [pair[True].step_s / pair[False].step_s for pair in pairs]
    cpu_ratios = [pair[True].cpu_s / pair[False].cpu_s for pair in pairs]
    result: dict[str, Any] = {"pairs": len(pairs), "stored_tokens_per_step": pairs[0][True].stored_tokens / STEPS}
    for name, is_stored in (("stored", True), ("not_stored", False)):
        result[f"step_ms_{name}"] = round(statistics.median(pair[is_stored].step_s for pair in pairs) * 1e3, 3)
    for name, values in (("ratio", ratios), ("cpu_ratio", cpu_ratios)):
        result[name] = round(statistics.median(values), 4)
        result[f"{name}_quartiles"] = [round(value, 3) for value in statistics.quantiles(values, n=4)]
    return result


@dataclass(frozen=True)
class Decode:
    """A long decode beside short requests. `cpu_s`: of the worker and its engine, while it ran."""

    step_s: float
    cpu_s: float
    stored_tokens: int


async def one_decode(engine: SglangEngine, rng: random.Random, is_stored: bool) -> Decode:
    """Decode `STEPS` tokens while `BESIDE` requests follow each other. The copies belong to it until the last ended."""
    store = engine.kv.store
    before_tokens, before_s = store.directory.figures.used_tokens, cpu_s(engine)

    async def beside() -> None:
        for _ in range(BESIDE):
            await play(engine, uuid4().hex if is_stored else "", text(rng, BESIDE_TOKENS), 8)

    (_, _, step_s, cached), _ = await asyncio.gather(play(engine, "", text(rng, 64), STEPS), beside())
    assert not cached
    await store.settle(SETTLE_S)
    stored_tokens = store.directory.figures.used_tokens - before_tokens
    used_s = cpu_s(engine) - before_s
    # Both begin with an empty device and an empty store.
    for session in session_ids(store.directory):
        await engine.kv.release_session(session)
    forget_all(store.directory)
    while not (await engine._manager.flush_cache()).success:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return Decode(step_s, used_s, stored_tokens)


def children(engine: SglangEngine) -> list[BaseProcess]:
    """SGLang's own processes."""
    assert engine._sglang is not None
    return engine._sglang.children


def cpu_s(engine: SglangEngine) -> float:
    """Processor seconds so far of this process and of the engine's."""
    ticks = 0
    for process in children(engine):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


async def rounds_of_sessions(engine: SglangEngine, sessions: int, *, is_stored: bool) -> dict[str, Any]:
    """All rounds of all sessions, one round of each session after the other."""
    rng = random.Random(f"sessions {is_stored}")  # the store has the KV of equal text
    contexts: list[list[int]] = [[] for _ in range(sessions)]
    counts = Counter(prompt=0, new=0, recomputed=0)
    _by_tier.clear()
    started_s = time.perf_counter()
    for number in range(ROUNDS):
        gate = asyncio.Semaphore(CONCURRENT)

        async def one_round(session: int, increment: list[int], gate: asyncio.Semaphore = gate) -> None:
            async with gate:
                context = contexts[session]
                # The KV of the last output token is computed with the next round.
                history = max(0, len(context) - 1) // PAGE * PAGE
                prompt = context + increment
                name = f"session-{session}-{is_stored}" if is_stored else ""
                tokens, _, _, cached = await play(engine, name, prompt, OUTPUT_TOKENS)
                counts.update(
                    prompt=len(prompt), new=len(prompt) - max(history, cached), recomputed=max(0, history - cached)
                )
                contexts[session] = prompt + tokens

        length = INCREMENT_TOKENS if number else FIRST_TOKENS
        await asyncio.gather(*(one_round(session, text(rng, length)) for session in range(sessions)))
        await engine.kv.store.settle(SETTLE_S)
    seconds = time.perf_counter() - started_s
    device, store = _by_tier["device"], sum(_by_tier.values()) - _by_tier["device"]
    assert device + store + counts["new"] + counts["recomputed"] == counts["prompt"], (_by_tier, counts)
    return {
        "sessions": sessions,
        "device": device,
        "store": store,
        **counts,
        "seconds": round(seconds, 1),
    }


async def resident_sessions(engine: SglangEngine, arguments: argparse.Namespace) -> dict[str, Any]:
    """With the store, and without."""
    stored = await rounds_of_sessions(engine, arguments.sessions, is_stored=True)
    return {"with store": stored, "without": await rounds_of_sessions(engine, arguments.sessions, is_stored=False)}


async def restart(engine: SglangEngine, arguments: argparse.Namespace) -> dict[str, Any]:
    """TTFT of the next round after the engine's processes were killed."""
    rng = random.Random(3)
    length, samples = arguments.context_tokens, 3
    contexts = []
    for number in range(samples):
        prompt = text(rng, length)
        tokens, *_ = await play(engine, f"restart-{number}", prompt, 4)
        contexts.append(prompt + tokens)
    await engine.kv.store.settle(SETTLE_S)
    for process in children(engine):
        process.kill()
    started_s = time.perf_counter()
    await engine.restart()
    restart_s = time.perf_counter() - started_s
    _by_tier.clear()
    reload_s, recompute_s, cached_tokens = [], [], []
    for number, context in enumerate(contexts):
        _, ttft_s, _, cached = await play(engine, f"restart-{number}", context + text(rng, 64), 1)
        reload_s.append(ttft_s)
        cached_tokens.append(cached)
        recompute_s.append((await play(engine, "", text(rng, len(context) + 64), 1))[1])
    assert _by_tier["device"] == 0, "nothing is on the device of a new engine"
    return {
        "context_tokens": length,
        "loaded_tokens": min(cached_tokens),
        "restart_s": round(restart_s, 1),
        "ttft_s_loaded": round(statistics.median(reload_s), 3),
        "ttft_s_recomputed": round(statistics.median(recompute_s), 3),
        "ratio": round(statistics.median(a / b for a, b in zip(reload_s, recompute_s, strict=True)), 4),
    }


PARTS: dict[str, Callable[[SglangEngine, argparse.Namespace], Awaitable[dict[str, Any]]]] = {
    "decode": decode,
    "sessions": resident_sessions,
    "restart": restart,
}


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Each part on an engine of its own."""
    count_tiers()
    results: dict[str, Any] = {}
    for part in arguments.parts or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            longest = max(arguments.context_tokens + 256, 4096)
            sizes = replace(WIDE if part == "restart" else NARROW, max_context_tokens=longest)
            pool = RESIDENT_SESSIONS * SESSION_TOKENS if part == "sessions" else 2 * longest
            settings = SglangSettings(
                model=make_tiny_model(Path(folder) / "model", sizes),
                dtype="float32",
                device=Device.CPU,
                max_total_tokens=pool,
                kv_store_gib=1.0,
                tp=arguments.tp,
            )
            engine = SglangEngine(settings)
            try:
                await engine.start()
                results[part] = await PARTS[part](engine, arguments)
            finally:
                await engine.stop()
    return results


def show(results: dict[str, Any]) -> None:
    """A table per part."""
    for part, result in results.items():
        if part == "sessions":
            columns = list(next(iter(result.values())))
            print(f"{part:14}" + "".join(f"{name:>12}" for name in columns))
            for name, row in result.items():
                print(f"{name:14}" + "".join(f"{row[column]:>12}" for column in columns))
        else:
            print(f"{part:14}" + "  ".join(f"{name} {value}" for name, value in result.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--sessions", type=int, default=300, help="sessions of 8 rounds")
    parser.add_argument("--context-tokens", type=int, default=20000, help="context when the engine is killed")
    parser.add_argument("--repeats", type=int, default=60, help="pairs of decodes")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the engine")
    arguments = parser.parse_args()
    with forked_engines() if arguments.tp > 1 else nullcontext():
        results = asyncio.run(run(arguments))
    if arguments.json:
        print(json.dumps({"results": results}))
    else:
        show(results)


if __name__ == "__main__":
    main()
