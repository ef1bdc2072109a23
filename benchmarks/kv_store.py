"""What the KV store costs and saves, on a real SGLang engine with a tiny model on the CPU.

    python benchmarks/kv_store.py [decode] [sessions] [restart] [--json] [--sessions 300] [--context-tokens 20000]

`decode`: a long decode, while short requests come and go beside it: first requests of sessions, whose KV is written to
the store, then requests of no session, which are not stored. Both take turns. `ratio` is the median of the times per
decode step, stored over not stored.
`sessions`: sessions of 8 rounds take turns on a device pool that holds 20 of them. Tokens of the prompts by where they
came from, with the store and without. `recomputed` is history that the engine had computed in an earlier round;
`new` has the increments, and the tail of the history that does not fill a page.
`restart`: the engine's processes are killed between rounds and start again over the same store. `ratio` is the TTFT of
the next round over that of a prompt of the same length whose KV is not stored, medians.
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
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

from ampd.tiny_model import TinyModel, make_tiny_model
from workers.engines import sglang_request
from workers.engines.base import EngineOutput, EngineRequest
from workers.engines.sglang import SglangEngine, SglangSettings

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
    steps_s: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(arguments.repeats + 1):
        # The order changes, because whatever comes second finds a larger tree.
        for is_stored in (True, False) if repeat % 2 else (False, True):

            async def beside(is_stored: bool) -> None:
                for _ in range(BESIDE):
                    session = uuid4().hex if is_stored else ""
                    await play(engine, session, text(rng, BESIDE_TOKENS), 8)
                    if session:
                        await engine.kv.release_session(session)

            measured, _ = await asyncio.gather(play(engine, "", text(rng, 64), STEPS), beside(is_stored))
            await engine.kv.store.settle(SETTLE_S)
            if repeat:
                steps_s[is_stored].append(measured[2])
    ratios = [stored / other for stored, other in zip(steps_s[True], steps_s[False], strict=True)]
    return {
        "pairs": len(ratios),
        "step_ms_stored": round(statistics.median(steps_s[True]) * 1e3, 3),
        "step_ms_not_stored": round(statistics.median(steps_s[False]) * 1e3, 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(value, 3) for value in statistics.quantiles(ratios, n=4)],
    }


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
    return {
        "sessions": sessions,
        "device": _by_tier["device"],
        "store": sum(_by_tier.values()) - _by_tier["device"],
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
    for process in engine._processes:
        process.kill()
    started_s = time.perf_counter()
    await engine.restart()
    restart_s = time.perf_counter() - started_s
    reload_s, recompute_s, cached_tokens = [], [], []
    for number, context in enumerate(contexts):
        _, ttft_s, _, cached = await play(engine, f"restart-{number}", context + text(rng, 64), 1)
        reload_s.append(ttft_s)
        cached_tokens.append(cached)
        recompute_s.append((await play(engine, "", text(rng, len(context) + 64), 1))[1])
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
            sizes = TinyModel(layers=2, hidden_size=128, heads=4, kv_heads=2, max_context_tokens=longest)
            pool = RESIDENT_SESSIONS * SESSION_TOKENS if part == "sessions" else 4 * longest
            settings = SglangSettings(
                model=make_tiny_model(Path(folder) / "model", sizes),
                dtype="float32",
                device="cpu",
                max_total_tokens=pool,
                kv_store_gib=1.0,
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
    parser.add_argument("--repeats", type=int, default=20, help="pairs of decodes")
    arguments = parser.parse_args()
    results = asyncio.run(run(arguments))
    if arguments.json:
        print(json.dumps({"results": results}))
    else:
        show(results)


if __name__ == "__main__":
    main()
