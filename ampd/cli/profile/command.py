"""`ampd profile`: measures an engine and writes the performance model that fits it.

It joins two rooms, the engines of `workers` and the profiler of `planner`, as only the command line does.
"""

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

from pydantic import Field
from tqdm import tqdm

from ampd.cli.serve.settings import TINY, EngineName
from ampd.errors import RunError, UserError
from ampd.model_folder import check_model_folder
from ampd.perf.profile import PerformanceProfile, Provenance, write_profile
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
    worker_args: str = Field("", description="Further flags of the engine, as one string (python -m workers --help).")
    as_json: bool = Field(False, validation_alias="json", description="Print one JSON object on stdout.")


def run(argv: Sequence[str]) -> int:
    """Measure (or read) the points, fit, write the file, print the errors.

    Raises:
        UserError: wrong flags or a model that cannot be used.
        RunError: the engine failed.
    """
    from planner.profiler.grid import Density

    settings = parse_settings(ProfileSettings, argv, PROG)
    if settings.grid not in set(Density):
        raise UserError(f"--grid: known are {', '.join(Density)} (given: {settings.grid!r})")
    for path in (settings.output, settings.points):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise UserError(f"{path}: cannot be written; its folder must exist and it must not be a folder itself")
    if settings.refit is not None and settings.points is not None:
        raise UserError("--points: nothing is measured with --refit, so there are no points to write; leave one out")
    if settings.engine is EngineName.SGLANG and settings.refit is None and find_spec("sglang") is None:
        raise UserError("--engine sglang: SGLang is not installed: pip install 'ampd[sglang]'")
    if settings.refit is not None:
        row = _read_points(settings.refit)
    else:
        row = asyncio.run(_measured(settings))
        if settings.points:
            settings.points.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    profile = _fitted(row, settings)
    write_profile(profile, settings.output)
    result = {
        "output": str(settings.output),
        "fit_error": profile.provenance.fit_error,
        "points": {name: len(row["points"][name]) for name in ("prefill", "decode", "transfer")},
        "discarded": row["points"]["discarded"],
        "kv_capacity_tokens": row["engine"]["kv_capacity_tokens"],
    }
    print(json.dumps(result, indent=1) if settings.as_json else _text(result, profile))
    return 0


# -- measuring


async def _measured(settings: ProfileSettings) -> dict[str, Any]:
    """The points and everything that the file says about where they come from."""
    from ampd.cli.profile.probe import EngineProbe
    from planner.profiler.grid import Density, Limits, grid_of
    from planner.profiler.measure import measure
    from workers.engines.base import EngineError

    try:
        async with AsyncExitStack() as stack:
            # The second one only gives KV away; it is not measured.
            engines = [await _started(settings, stack) for _ in range(2)]
            info = engines[0].info
            limits = Limits(info.max_context_tokens, info.kv_capacity_tokens, info.page_size_tokens)
            grid = grid_of(Density(settings.grid), limits, settings.max_tokens)
            load_before = os.getloadavg()[0]
            total = (settings.repeats + 1) * len(grid)
            with tqdm(total=total, desc="measuring", unit="point", file=sys.stderr, disable=None, leave=False) as bar:
                probe = EngineProbe(engines[0], engines[1], settings.seed)
                points = await measure(probe, grid, settings.repeats, settings.seed, lambda: _step(bar))
            return {"points": points.as_dict(), "engine": _engine_row(info, settings, load_before)}
    except EngineError as error:
        raise RunError(f"{PROG}: {error}") from None


def _step(bar: tqdm[Any]) -> None:
    bar.update()


async def _started(settings: ProfileSettings, stack: AsyncExitStack) -> Engine:
    from ampd.perf.model import PerformanceModel
    from workers.engines import create_engine, performance_model, settings_model

    folder = str(tiny_model_path()) if settings.model == TINY else str(check_model_folder(Path(settings.model), PROG))
    flags = ["--role", "prefill", "--engine", settings.engine, "--model", folder, "--tp", str(settings.tp)]
    worker = parse_settings(settings_model(settings.engine), [*flags, *_words(settings.worker_args)], PROG)
    model: PerformanceModel = performance_model(worker)
    engine = create_engine(worker, model)
    stack.push_async_callback(engine.stop)
    await engine.start()
    return engine


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{PROG}: --worker-args: {str(error).lower()} (given: {text!r})") from None


def _engine_row(info: EngineInfo, settings: ProfileSettings, load_before: float) -> dict[str, Any]:
    return {
        "tp": info.parallelism.tp,
        "kv_capacity_tokens": info.kv_capacity_tokens,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "max_context_tokens": info.max_context_tokens,
        "model": settings.model,
        "engine": str(settings.engine),
        "machine": _machine(),
        "date": datetime.date.today().isoformat(),
        "grid": settings.grid,
        "repeats": settings.repeats,
        "load_average_before": round(load_before, 2),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "versions": {"ampd": version("ampd")} | ({"sglang": version("sglang")} if settings.engine == "sglang" else {}),
    }


def _machine() -> str:
    """The GPU, or the processor where there is none."""
    try:
        import torch

        if torch.cuda.is_available():
            return str(torch.cuda.get_device_name(0))
    except ImportError:
        pass
    return f"{os.cpu_count()} {platform.machine()} CPU cores"


# -- fitting

_ENGINE_KEYS = {
    *("tp", "kv_capacity_tokens", "kv_bytes_per_token", "max_context_tokens", "model", "engine", "machine", "date"),
    *("grid", "repeats", "load_average_before", "threads", "versions"),
}
"""What a file of points says about the engine (see `_engine_row`)."""


def _read_points(path: Path) -> dict[str, Any]:
    from planner.profiler.measure import Points

    try:
        row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        Points.from_dict(row["points"])
        if lacking := _ENGINE_KEYS - set(row["engine"]):
            raise ValueError(f"no {min(lacking)}")
        datetime.date.fromisoformat(row["engine"]["date"])
        row["engine"]["tp"] = int(row["engine"]["tp"])
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: not a file of measured points; `{PROG} --points FILE` writes one") from None
    return row


def _fitted(row: dict[str, Any], settings: ProfileSettings) -> PerformanceProfile:
    from planner.profiler.fitting import fit_profile
    from planner.profiler.measure import Points

    points: Points = Points.from_dict(row["points"])
    engine = row["engine"]
    about: dict[str, float | str] = {
        "grid": engine["grid"],
        "repeats": engine["repeats"],
        "points_prefill": len(points.prefill),
        "points_decode": len(points.decode),
        "points_transfer": len(points.transfer),
        "discarded_measurements": points.discarded,
        "held_out_share": settings.held_out,
        "load_average_before": engine["load_average_before"],
        "threads": engine["threads"],
        **{f"version_{name}": number for name, number in engine["versions"].items()},
    }
    provenance = Provenance(
        kind="measured",
        source=f"ampd profile, engine {engine['engine']}",
        model=engine["model"],
        gpu=engine["machine"],
        date=datetime.date.fromisoformat(engine["date"]),
        method="Medians over the repeats of every point of a grid, in random order; piecewise alpha-beta curves by "
        "non-negative least squares on relative errors. Prefill: time to the first token of a lone request.",
        assumptions=about,
    )
    return fit_profile(
        points,
        provenance,
        engine["tp"],
        settings.held_out,
        settings.seed,
        kv_capacity_tokens=engine["kv_capacity_tokens"],
        kv_bytes_per_token=engine["kv_bytes_per_token"],
        max_context_tokens=engine["max_context_tokens"],
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
        lines.append(f"  {result['discarded']} measurements did not come about as asked and were left out")
    return "\n".join(lines)
