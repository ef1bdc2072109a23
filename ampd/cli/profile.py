"""`ampd profile`: measures an engine, and fits its performance model."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from pydantic import Field

from ampd.cli.serve.devices import TINY_CPU
from ampd.cli.serve.settings import TINY, EngineName
from ampd.documents import check_writable, write_document
from ampd.errors import RunError, UserError
from ampd.keys import page_keys
from ampd.model_folder import check_model_folder
from ampd.perf.profile import PerformanceProfile, Provenance, read_profile, write_profile
from ampd.progress import Progress
from ampd.settings import Settings, parse_settings
from ampd.tiny_model import tiny_model_path
from ampd.wire import KvReply, KvRequest
from planner.profiler import Density, Limits, Points, Seen, extended, fit_profile, grid_of, left_to_measure, measure
from workers.engines import create_engine, performance_model, settings_model
from workers.engines.base import Engine, EngineError, EngineInfo, EngineOutput, EngineRequest
from workers.kv.exchange import KvExchange

# -- runs prefills, decode batches and KV moves on an engine, and times them

_GREEDY = {"sampling_options": {"temperature": 0.0}, "stop_conditions": {"ignore_eos": True}}
_STEPS = 16
"""Decode steps that are timed once the whole batch decodes."""
_JOINED_STEPS = 2
"""Decode steps of a batch before a prefill begins beside it."""
_SETTLING_TOKENS = 4
"""Output of the request that waits until a batch has left. Engines may drop aborted rounds only in the next step."""
_TOKEN_IDS = (64, 250)
_TIMEOUT_S = 60.0


class LocalPeer:
    """Another worker, of which there is only the store."""

    def __init__(self, kv: KvExchange[Any]) -> None:
        self._kv = kv

    async def call(self, _worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        """Raises `TimeoutError`."""
        return await asyncio.wait_for(self._kv.serve(request), timeout_s)


class EngineProbe:
    """Times one engine, which must be running. `peer`: another store, from which it reads KV.

    Every measurement uses new tokens and a new session, so that no cache distorts it, and releases them afterwards.
    """

    def __init__(self, engine: Engine, peer: KvExchange[Any], seed: int) -> None:
        self._engine = engine
        self._peer = peer
        self._rng = random.Random(seed)
        engine.kv.connect(LocalPeer(peer), lambda _session_id, _tokens: None)

    async def prefill_s(self, hist_tokens: int, incr_tokens: int) -> float | None:
        """Time to the first token; None if the engine's cache did not hold exactly the history."""
        session_id, tokens = _name(), self._tokens(hist_tokens + incr_tokens)
        try:
            if hist_tokens:
                await self._run(session_id, tokens[:hist_tokens], 0)
                # Its way to the store must not delay what is timed.
                await self._engine.kv.store.settle(_TIMEOUT_S)
            start_s = time.perf_counter()
            output = await self._run(session_id, tokens, 1)
            seconds = time.perf_counter() - start_s
        finally:
            await self._engine.kv.release_session(session_id)
        return seconds if output.cached_tokens == hist_tokens else None

    async def decode_step_s(self, batch: int, context_tokens: int) -> float | None:
        """Median gap between tokens while the whole batch decodes; None if too few steps did."""
        batch_times_s: list[list[float]] = [[] for _ in range(batch)]

        def is_over() -> bool:
            if not all(len(times_s) > _STEPS for times_s in batch_times_s):
                return False
            joined_s = max(times_s[0] for times_s in batch_times_s)
            return all(sum(at_s >= joined_s for at_s in times_s) > _STEPS for times_s in batch_times_s)

        await self._decode_batch(batch_times_s, context_tokens, is_over)
        joined_s = max((times_s[0] for times_s in batch_times_s if times_s), default=0.0)
        gaps_s = [
            after_s - before_s
            for times_s in batch_times_s
            for before_s, after_s in pairwise(times_s)
            if before_s >= joined_s
        ]
        # The last gaps belong to a batch that has already become smaller.
        return statistics.median(gaps_s) if len(gaps_s) >= batch * _STEPS // 2 else None

    async def mixed_pass_s(self, batch: int, context_tokens: int, incr_tokens: int) -> float | None:
        """Longest gap between two tokens of a decode batch beside a prefill; None if the batch ended before.

        An engine that mixes makes a step in the pass of the prefill. With any other the gap has the time of both.
        """
        batch_times_s: list[list[float]] = [[] for _ in range(batch)]
        joined, begin_s, end_s = asyncio.Event(), inf, inf

        def is_over() -> bool:
            if all(len(times_s) > _JOINED_STEPS for times_s in batch_times_s):
                joined.set()
            return all(times_s and times_s[-1] > end_s for times_s in batch_times_s)

        decoding = asyncio.create_task(self._decode_batch(batch_times_s, context_tokens, is_over))
        waiting, session_id = asyncio.create_task(joined.wait()), _name()
        try:
            await asyncio.wait({decoding, waiting}, return_when=asyncio.FIRST_COMPLETED)
            begin_s = time.perf_counter()
            await self._run(session_id, self._tokens(incr_tokens), 1)
            end_s = time.perf_counter()
            await decoding
        finally:
            for task in (waiting, decoding):
                task.cancel()
            await asyncio.wait({waiting, decoding})
            await self._engine.kv.release_session(session_id)
        longest_s = [
            max(
                (
                    after_s - before_s
                    for before_s, after_s in pairwise(times_s)
                    if before_s < end_s and after_s > begin_s
                )
            )
            for times_s in batch_times_s
            if times_s and times_s[0] < begin_s and times_s[-1] > end_s
        ]
        return statistics.median(longest_s) if len(longest_s) == batch else None

    async def transfer_s(self, tokens: int) -> float | None:
        """Time of a read from the peer, including the directory look-up; None if it moved too little."""
        rid, page = uuid4().hex, self._engine.info.page_size_tokens
        keys = page_keys(self._tokens(tokens), page, tenant="")
        try:
            await self._peer.store.put(keys)
            fetched = await self._engine.kv.fetch(rid, keys, self._engine.kv.protect(rid, keys), "peer", _TIMEOUT_S)
        finally:
            await self._engine.kv.unprotect(rid)
        return fetched.seconds if fetched.error is None and fetched.tokens == tokens // page * page else None

    async def reload_s(self, tokens: int) -> float | None:
        """Time of a copy from the store to the device; None if some of these tokens were computed instead."""
        session_id, page = _name(), self._engine.info.page_size_tokens
        # The page of the last token is never loaded, because that token is always computed.
        context = self._tokens(tokens + 1)
        try:
            await self._engine.kv.store.put(page_keys(context[:tokens], page, tenant=""))
            output = await self._run(session_id, context, 1)
        finally:
            await self._engine.kv.release_session(session_id)
        return output.reload_s or None if output.reloaded_tokens == tokens // page * page else None

    async def _decode_batch(
        self, batch_times_s: list[list[float]], context_tokens: int, is_over: Callable[[], bool]
    ) -> None:
        """A batch that decodes until `is_over`, which is asked at each token. The engine is idle afterwards."""
        await asyncio.gather(*(self._decode(times_s, context_tokens, is_over) for times_s in batch_times_s))
        await self._settle()

    async def _decode(self, times_s: list[float], context_tokens: int, is_over: Callable[[], bool]) -> None:
        """One sequence of a batch."""
        session_id, page = _name(), self._engine.info.page_size_tokens
        room = self._engine.info.max_context_tokens - context_tokens - page
        call = EngineRequest(uuid4().hex, session_id, self._tokens(context_tokens), min(8 * _STEPS, room), _GREEDY)
        try:
            async with aclosing(cast(AsyncGenerator[EngineOutput, None], self._engine.generate(call))) as stream:
                async for output in stream:
                    if output.token_ids:
                        times_s.append(time.perf_counter())
                    if is_over():
                        break
        finally:
            await self._engine.kv.release_session(session_id)

    async def _settle(self) -> None:
        """Wait until the engine is idle, because a step of an aborted batch would delay the next measurement."""
        session_id = _name()
        try:
            await self._run(session_id, self._tokens(1), _SETTLING_TOKENS)
        finally:
            await self._engine.kv.release_session(session_id)

    async def _run(self, session_id: str, tokens: list[int], new: int) -> EngineOutput:
        """Run one request to its end. The last output has the engine's counts."""
        last = EngineOutput([])
        call = EngineRequest(uuid4().hex, session_id, tokens, new, _GREEDY)
        async with aclosing(cast(AsyncGenerator[EngineOutput, None], self._engine.generate(call))) as stream:
            async for output in stream:
                last = output
        if last.finish_reason is None:
            raise EngineError("the engine ended a request without a reason")
        return last

    def _tokens(self, count: int) -> list[int]:
        first, last = _TOKEN_IDS
        return [self._rng.randint(first, last) for _ in range(count)]


def _name() -> str:
    return f"profile-{uuid4().hex}"


# -- `ampd profile`: measures an engine of `workers` and fits a performance model with the profiler of `planner`

PROG = "ampd profile"
_HELD_OUT = 0.2
"""Share of the points that the fit does not see."""


class ProfileSettings(Settings):
    """Measure an engine over a grid of prefills, decode batches and KV moves, and fit the performance model."""

    output: Path = Field(description="Performance-model file to write.")
    engine: EngineName = Field(EngineName.SGLANG, description="Engine to measure.")
    model: str = Field(TINY, description="Model folder (Hugging Face layout), or `tiny`.")
    tp: int = Field(1, ge=1, description="Tensor-parallel degree: GPUs of the replica.")
    grid: Density = Field(Density.NORMAL, description="Number of points.")
    max_tokens: int | None = Field(None, ge=32, description="Leave out longer contexts.")
    repeats: int = Field(3, ge=1, description="Measurements of each point, after one that only warms up.")
    seed: int = Field(0, description="Seed of prompts, order and held-out points.")
    points: Path | None = Field(
        None,
        description="Keep all measurements in this file (JSON); default: until the end, beside the output. A run that "
        "was interrupted goes on from there.",
    )

    @property
    def points_file(self) -> Path:
        return self.points or self.output.with_name(f"{self.output.name}.points")

    extend: Path | None = Field(
        None, description="Performance-model file of other tensor-parallel degrees, which the output has, too."
    )
    worker_args: str = Field("", description="Further flags of the engine, as one string (python -m workers --help).")
    as_json: bool = Field(False, validation_alias="json", description="Print one JSON object on stdout.")


def run(argv: Sequence[str]) -> int:
    """Measure the points, fit, write the file, print the errors.

    Raises:
        UserError: wrong flags or a model that cannot be used.
        RunError: the engine failed.
    """
    settings = parse_settings(ProfileSettings, argv, PROG)
    check_writable(settings.output, settings.points_file, replaces=True)
    if settings.engine is EngineName.SGLANG and find_spec("sglang") is None:
        raise UserError(
            "--engine sglang: SGLang is not installed: uv pip install --editable '.[sglang]' in AMPD's repository"
        )
    base = None if settings.extend is None else read_profile(settings.extend)
    seen = _read_points(settings)
    points, info, load_before = asyncio.run(_measured(settings, seen))
    profile = _fitted(points, info, load_before, settings)
    write_profile(profile if base is None else extended(base, profile), settings.output)
    if settings.points is None:
        settings.points_file.unlink()
    result = {
        "output": str(settings.output),
        "fit_error": profile.provenance.fit_error,
        "points": {name: len(getattr(points, name)) for name in ("prefill", "decode", "transfer", "reload", "mixed")},
        "discarded": points.discarded,
        "kv_capacity_tokens": info.kv_capacity_tokens,
    }
    print(json.dumps(result, indent=1) if settings.as_json else _text(result, profile))
    return 0


# -- measuring


def _run_id(settings: ProfileSettings) -> dict[str, Any]:
    """What the measurements of a file of points are of."""
    flags = settings.model_dump(mode="json", include={"engine", "model", "tp", "worker_args"})
    return {**flags, "machine": _machine(settings.engine), **_versions(settings.engine)}


def _versions(engine: EngineName) -> dict[str, str]:
    packages = ("ampd", "sglang") if engine is EngineName.SGLANG else ("ampd",)
    return {f"version_{name}": version(name) for name in packages}


def _read_points(settings: ProfileSettings) -> Seen:
    """The measurements of a run that was interrupted; none without its file.

    Raises:
        UserError: the file is of something else.
    """
    path = settings.points_file
    if not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["run"] != _run_id(settings):
            raise ValueError
        seen = {tuple(name): values for name, values in kept["points"]}
    except (ValueError, TypeError, KeyError):
        raise UserError(
            f"{PROG}: {path} has measurements of something else than this engine on this machine: remove it"
        ) from None
    print(f"{PROG}: {sum(map(len, seen.values()))} measurements are reused from {path}", file=sys.stderr)
    return seen


async def _measured(settings: ProfileSettings, seen: Seen) -> tuple[Points, EngineInfo, float]:
    """The points, the engine, and the load average of the machine before. Each measurement is kept at once."""
    try:
        async with AsyncExitStack() as stack:
            engine = await _started(settings, stack)
            info = engine.info
            limits = Limits(info.max_context_tokens, info.kv_capacity_tokens, info.page_size_tokens)
            grid = grid_of(settings.grid, limits, settings.max_tokens)
            peer = engine.kv.without_engine(max(grid.transfer))
            stack.push_async_callback(peer.close)
            load_before, run_id = os.getloadavg()[0], _run_id(settings)
            bar = stack.enter_context(Progress("measuring", left_to_measure(grid, settings.repeats, seen), "point"))

            def on_measured() -> None:
                kept = json.dumps({"run": run_id, "points": list(seen.items())})
                write_document(kept, settings.points_file, "measurements")
                bar.update()

            probe = EngineProbe(engine, peer, settings.seed)
            points = await measure(probe, grid, settings.repeats, settings.seed, on_measured, seen)
            return points, info, load_before
    except EngineError as error:
        raise RunError(f"{PROG}: {error}") from None


async def _started(settings: ProfileSettings, stack: AsyncExitStack) -> Engine:
    folder = str(tiny_model_path()) if settings.model == TINY else str(check_model_folder(Path(settings.model), PROG))
    flags = ["--role", "prefill", "--engine", settings.engine, "--model", folder, "--tp", str(settings.tp)]
    flags += ["--perf", TINY_CPU] if settings.model == TINY else []
    try:
        flags += shlex.split(settings.worker_args)
    except ValueError as error:
        given = settings.worker_args
        raise UserError(f"{PROG}: --worker-args: {str(error).lower()} (given: {given!r})") from None
    worker = parse_settings(settings_model(settings.engine), flags, PROG)
    # The times of an engine that computes are what is to be found.
    model = performance_model(worker) if settings.engine is EngineName.MODELLED else None
    engine = create_engine(worker, model)
    stack.push_async_callback(engine.stop)
    await engine.start()
    return engine


def _machine(engine: EngineName) -> str:
    """The GPU, or the processor if there is none or if the engine leaves it idle."""
    if engine is EngineName.SGLANG:
        import torch

        if torch.cuda.is_available():
            return str(torch.cuda.get_device_name(0))
    return f"{os.cpu_count()} {platform.machine()} CPU cores"


# -- fitting


def _fitted(points: Points, info: EngineInfo, load_before: float, settings: ProfileSettings) -> PerformanceProfile:
    assumptions: dict[str, float | str] = {
        "grid": settings.grid,
        "repeats": settings.repeats,
        "points_prefill": len(points.prefill),
        "points_decode": len(points.decode),
        "points_transfer": len(points.transfer),
        "points_reload": len(points.reload),
        "discarded_measurements": points.discarded,
        "held_out_share": _HELD_OUT,
        "load_average_before": round(load_before, 2),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        **_versions(settings.engine),
    }
    provenance = Provenance(
        kind="measured",
        source=f"ampd profile, engine {settings.engine}",
        model=settings.model,
        gpu=_machine(settings.engine),
        date=datetime.date.today(),
        method="Medians over the repeats of every point of a grid, in random order; piecewise alpha-beta curves by "
        "non-negative least squares on relative errors. Prefill: time to the first token of a lone request.",
        assumptions=assumptions,
    )
    return fit_profile(
        points,
        provenance,
        info.parallelism.tp,
        _HELD_OUT,
        settings.seed,
        kv_capacity_tokens=info.kv_capacity_tokens,
        kv_bytes_per_token=info.kv_bytes_per_token,
        max_context_tokens=info.max_context_tokens,
        attention_backend=info.attention_backend,
    )


def _text(result: dict[str, Any], profile: PerformanceProfile) -> str:
    counts, curves = result["points"], profile.workers[0]
    segments = (len(curves.prefill.segments), len(curves.decode.segments), len(profile.kv_transfers[0].segments))
    lines = [f"{result['output']}: fitted; relative error on points that the fit has not seen"]
    for name, pieces in zip(("prefill", "decode", "kv_transfer"), segments, strict=True):
        mean, most = (result["fit_error"].get(f"{name}_{what}") for what in ("mean", "max"))
        shown = "-" if mean is None or most is None else f"mean {mean:.1%}, largest {most:.1%}"
        lines.append(f"  {name:<12} {shown} ({counts[name.removeprefix('kv_')]} points, {pieces} segments)")
    if result["discarded"]:
        lines.append(f"  {result['discarded']} measurements did not succeed as requested and were left out")
    return "\n".join(lines)
