"""`ampd profile`: measures an engine of `workers` and fits a performance model with the profiler of `planner`."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field
from tqdm import tqdm

from ampd.cli.serve.default_perf import TINY_CPU
from ampd.cli.serve.settings import TINY, EngineName
from ampd.documents import check_writable
from ampd.errors import RunError, UserError
from ampd.model_folder import check_model_folder
from ampd.perf.profile import PerformanceProfile, Provenance, read_profile, write_profile
from ampd.settings import Settings, parse_settings
from ampd.tiny_model import tiny_model_path

if TYPE_CHECKING:
    from planner.profiler.measure import Points
    from workers.engines.base import Engine, EngineInfo

PROG = "ampd profile"


class ProfileSettings(Settings):
    """Measure an engine over a grid of prefills, decode batches and KV moves, and fit the performance model."""

    output: Path = Field(description="Performance-model file to write.")
    engine: EngineName = Field(EngineName.SGLANG, description="Engine to measure.")
    model: str = Field(TINY, description="Model folder (Hugging Face layout), or `tiny`.")
    tp: int = Field(1, ge=1, description="Tensor-parallel degree: GPUs of the replica.")
    grid: str = Field("normal", description="Number of points: quick, normal or full.")
    max_tokens: int | None = Field(None, ge=32, description="Leave out longer contexts.")
    repeats: int = Field(3, ge=1, description="Measurements of each point, after one that only warms up.")
    held_out: float = Field(0.2, gt=0, lt=0.6, description="Share of the points that the fit does not see.")
    seed: int = Field(0, description="Seed of prompts, order and held-out points.")
    points: Path | None = Field(None, description="Write the measured points to this file, too (JSON).")
    refit: Path | None = Field(None, description="Fit the points of such a file again instead of measuring.")
    extend: Path | None = Field(
        None, description="Performance-model file of other tensor-parallel degrees, which the output has, too."
    )
    worker_args: str = Field("", description="Further flags of the engine, as one string (python -m workers --help).")
    as_json: bool = Field(False, validation_alias="json", description="Print one JSON object on stdout.")


def run(argv: Sequence[str]) -> int:
    """Measure (or read) the points, fit, write the file, print the errors.

    Raises:
        UserError: wrong flags or a model that cannot be used.
        RunError: the engine failed.
    """
    from planner.profiler.fitting import extended
    from planner.profiler.grid import Density

    settings = parse_settings(ProfileSettings, argv, PROG)
    if settings.grid not in set(Density):
        raise UserError(f"--grid: known are {', '.join(Density)} (given: {settings.grid!r})")
    check_writable(settings.output, replaces=True)
    check_writable(settings.points)
    if settings.refit is not None and settings.points is not None:
        raise UserError("--points: nothing is measured with --refit, so there are no points to write; leave one out")
    if settings.engine is EngineName.SGLANG and settings.refit is None and find_spec("sglang") is None:
        raise UserError(
            "--engine sglang: SGLang is not installed: uv pip install --editable '.[sglang]' in AMPD's repository"
        )
    base = None if settings.extend is None else read_profile(settings.extend)
    if settings.refit is not None:
        points, engine = _read_points(settings.refit)
    else:
        points, engine = asyncio.run(_measured(settings))
        if settings.points:
            row = {"points": points.model_dump(mode="json"), "engine": engine.model_dump(mode="json")}
            settings.points.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    profile = _fitted(points, engine, settings)
    write_profile(profile if base is None else extended(base, profile), settings.output)
    result = {
        "output": str(settings.output),
        "fit_error": profile.provenance.fit_error,
        "points": {name: len(getattr(points, name)) for name in ("prefill", "decode", "transfer")},
        "discarded": points.discarded,
        "kv_capacity_tokens": engine.kv_capacity_tokens,
    }
    print(json.dumps(result, indent=1) if settings.as_json else _text(result, profile))
    return 0


# -- measuring


class EngineFacts(BaseModel):
    """The part `engine` of a file of points: what was measured, where and how."""

    tp: int
    kv_capacity_tokens: int
    kv_bytes_per_token: int
    max_context_tokens: int
    model: str
    engine: str
    machine: str
    date: datetime.date
    grid: str
    repeats: int
    load_average_before: float
    threads: str
    versions: dict[str, str]


async def _measured(settings: ProfileSettings) -> tuple[Points, EngineFacts]:
    from ampd.cli.profile.probe import EngineProbe
    from planner.profiler.grid import Density, Limits, grid_of
    from planner.profiler.measure import measure
    from workers.engines.base import EngineError

    try:
        async with AsyncExitStack() as stack:
            # The second engine is not measured. It only serves KV to the first.
            engine, peer = [await _started(settings, stack) for _ in range(2)]
            info = engine.info
            limits = Limits(info.max_context_tokens, info.kv_capacity_tokens, info.page_size_tokens)
            grid = grid_of(Density(settings.grid), limits, settings.max_tokens)
            load_before = os.getloadavg()[0]
            total = (settings.repeats + 1) * len(grid)
            with tqdm(total=total, desc="measuring", unit="point", file=sys.stderr, disable=None, leave=False) as bar:
                probe = EngineProbe(engine, peer, settings.seed)
                points = await measure(probe, grid, settings.repeats, settings.seed, bar.update)
            return points, _facts(info, settings, load_before)
    except EngineError as error:
        raise RunError(f"{PROG}: {error}") from None


async def _started(settings: ProfileSettings, stack: AsyncExitStack) -> Engine:
    from workers.engines import create_engine, performance_model, settings_model

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


def _facts(info: EngineInfo, settings: ProfileSettings, load_before: float) -> EngineFacts:
    packages = ("ampd", "sglang") if settings.engine is EngineName.SGLANG else ("ampd",)
    return EngineFacts(
        tp=info.parallelism.tp,
        kv_capacity_tokens=info.kv_capacity_tokens,
        kv_bytes_per_token=info.kv_bytes_per_token,
        max_context_tokens=info.max_context_tokens,
        model=settings.model,
        engine=settings.engine,
        machine=_machine(settings.engine),
        date=datetime.date.today(),
        grid=settings.grid,
        repeats=settings.repeats,
        load_average_before=round(load_before, 2),
        threads=os.environ.get("OMP_NUM_THREADS", "default"),
        versions={name: version(name) for name in packages},
    )


def _machine(engine: EngineName) -> str:
    """The GPU, or the processor if there is none or if the engine leaves it idle."""
    if engine is EngineName.SGLANG:
        import torch

        if torch.cuda.is_available():
            return str(torch.cuda.get_device_name(0))
    return f"{os.cpu_count()} {platform.machine()} CPU cores"


# -- fitting


def _read_points(path: Path) -> tuple[Points, EngineFacts]:
    from planner.profiler.measure import Points

    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        return Points.model_validate(row["points"]), EngineFacts.model_validate(row["engine"])
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (KeyError, TypeError, ValueError, RecursionError):
        raise UserError(f"{path}: not a file of measured points; `{PROG} --points FILE` writes one") from None


def _fitted(points: Points, engine: EngineFacts, settings: ProfileSettings) -> PerformanceProfile:
    from planner.profiler.fitting import fit_profile

    assumptions: dict[str, float | str] = {
        "grid": engine.grid,
        "repeats": engine.repeats,
        "points_prefill": len(points.prefill),
        "points_decode": len(points.decode),
        "points_transfer": len(points.transfer),
        "discarded_measurements": points.discarded,
        "held_out_share": settings.held_out,
        "load_average_before": engine.load_average_before,
        "threads": engine.threads,
        **{f"version_{name}": number for name, number in engine.versions.items()},
    }
    provenance = Provenance(
        kind="measured",
        source=f"ampd profile, engine {engine.engine}",
        model=engine.model,
        gpu=engine.machine,
        date=engine.date,
        method="Medians over the repeats of every point of a grid, in random order; piecewise alpha-beta curves by "
        "non-negative least squares on relative errors. Prefill: time to the first token of a lone request.",
        assumptions=assumptions,
    )
    return fit_profile(
        points,
        provenance,
        engine.tp,
        settings.held_out,
        settings.seed,
        kv_capacity_tokens=engine.kv_capacity_tokens,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        max_context_tokens=engine.max_context_tokens,
    )


def _text(result: dict[str, Any], profile: PerformanceProfile) -> str:
    counts, curves = result["points"], profile.workers[0]
    segments = (len(curves.prefill.segments), len(curves.decode.segments), len(profile.kv_transfers[0].segments))
    lines = [f"{result['output']}: fitted; relative error on points that the fit has not seen"]
    for name, count, pieces in zip(("prefill", "decode", "kv_transfer"), counts.values(), segments, strict=True):
        mean, most = (result["fit_error"].get(f"{name}_{what}") for what in ("mean", "max"))
        shown = "-" if mean is None or most is None else f"mean {mean:.1%}, largest {most:.1%}"
        lines.append(f"  {name:<12} {shown} ({count} points, {pieces} segments)")
    if result["discarded"]:
        lines.append(f"  {result['discarded']} measurements did not succeed as requested and were left out")
    return "\n".join(lines)
