"""The GPUs of this machine: how they are divided among the workers of a graph, and the performance model for them."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import accumulate
from pathlib import Path

from ampd.cli.serve.settings import TINY
from ampd.errors import UserError
from ampd.perf.gpus import GPUS, preset_of
from ampd.perf.presets import load_performance_model
from ampd.perf.roofline import MEMORY_SHARE
from ampd.settings import PREFIX
from ampd.types import GIB
from workers.engines.modelled_tokens import read_model_folder

# -- finds the GPUs of this machine, and divides them or the CPU cores among the workers of a local graph

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
_QUERY = "index,name,memory.total,memory.used,driver_version"
_TIMEOUT_S = 60.0
_MOST_DIGITS = 12
_FIX = "see that the driver is loaded and fits its own tools, and in a container that it has the GPUs"


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """One GPU. Sizes in MiB, as the driver gives them; 0: the driver does not know."""

    index: int
    name: str
    memory_mib: int
    used_mib: int
    driver: str


def found_gpus() -> list[FoundGpu]:
    """The NVIDIA GPUs that this process may use; none without a driver.

    Raises:
        UserError: there is a driver, and it fails.
    """
    visible = _chosen()
    if shutil.which("nvidia-smi") is None or visible == []:
        return []
    try:
        listing = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"nvidia-smi has not answered for {_TIMEOUT_S:.0f} s; {_FIX}") from None
    if listing.returncode != 0:
        reason = " ".join((listing.stdout or listing.stderr).split())[:300] or "no message"
        raise UserError(f"nvidia-smi fails: {reason}; {_FIX}")
    try:
        gpus = parsed(listing.stdout)
    except (ValueError, csv.Error):
        raise UserError(f"nvidia-smi lists the GPUs in an unknown form; {_FIX}") from None
    # They may be named by other ids than their indices, too.
    return [gpu for gpu in gpus if visible is None or str(gpu.index) in visible] or gpus


def parsed(listing: str) -> list[FoundGpu]:
    """The rows of `nvidia-smi`. A field that the GPU does not have is text such as `[N/A]`.

    Raises:
        ValueError, csv.Error: they are other rows.
    """
    rows = csv.reader(StringIO(listing), skipinitialspace=True)
    return [
        FoundGpu(_index(index), name, _number(total) or 0, _number(used) or 0, driver)
        for index, name, total, used, driver in (row for row in rows if row)
    ]


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() and len(text) <= _MOST_DIGITS else None


def _index(text: str) -> int:
    if (index := _number(text)) is None:
        raise ValueError("a GPU without an index")
    return index


def visible_gpus() -> list[str]:
    """Ids of the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` takes them; empty without NVIDIA GPUs."""
    if (chosen := _chosen()) is not None:
        return chosen
    try:
        return [str(gpu.index) for gpu in found_gpus()]
    except UserError:  # `ampd doctor` shows it; engines compute on the CPU
        return []


def _chosen() -> list[str] | None:
    chosen = os.environ.get(GPUS_VARIABLE)
    return None if chosen is None else [gpu.strip() for gpu in chosen.split(",") if gpu.strip()]


def shared_gpu(model: Path, engines: int) -> dict[str, str]:
    """Limits with which engines share the GPU of this machine. By itself the first of them would take all its memory.

    Args:
        model: folder of the model that each of them loads.

    Returns:
        An environment of each worker; empty if the driver does not know the memory.

    Raises:
        UserError: the weights leave no memory for KV.
    """
    memory_mib = min((gpu.memory_mib - gpu.used_mib for gpu in found_gpus() if gpu.memory_mib), default=0)
    if not memory_mib:
        return {}
    weight_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    share_bytes = MEMORY_SHARE.usable_share * (memory_mib << 20) / engines - MEMORY_SHARE.reserve_bytes
    tokens = int((share_bytes - weight_bytes) // read_model_folder(model).kv_bytes_per_token)
    if tokens < 1:
        raise UserError(
            f"ampd serve: {engines} engines with {weight_bytes / GIB:.1f} GiB of weights each do not fit into the "
            f"{memory_mib / 1024:.1f} GiB that the GPU has free; use fewer workers, a smaller model or more GPUs"
        )
    return {f"{PREFIX}MAX_TOTAL_TOKENS": str(tokens), f"{PREFIX}MEM_FRACTION": str(MEMORY_SHARE.usable_share)}


def worker_environments(degrees: Sequence[int], gpus: Sequence[str], cpus: int) -> list[dict[str, str]]:
    """The environment that gives each worker its devices.

    With GPUs each worker gets as many as its degree, in order; a single GPU may be shared by all workers of degree 1.
    Without GPUs the CPU's cores are split evenly among all ranks, so that engines do not compete for them.

    Args:
        degrees: tensor-parallel degree of each worker, which is its number of ranks.

    Raises:
        UserError: fewer GPUs than ranks.
    """
    ranks = sum(degrees)
    if not gpus:
        threads = str(max(1, cpus // ranks))
        return [{"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} for _ in degrees]
    if len(gpus) == 1 and ranks == len(degrees):
        return [{GPUS_VARIABLE: gpus[0]} for _ in degrees]
    if len(gpus) < ranks:
        raise UserError(
            f"ampd serve: {len(degrees)} workers at --tp {' and '.join(map(str, dict.fromkeys(degrees)))} need {ranks} "
            f"GPUs, this machine shows {len(gpus)}; use fewer workers or a smaller --tp"
        )
    ends = accumulate(degrees)
    return [{GPUS_VARIABLE: ",".join(gpus[end - tp : end])} for tp, end in zip(degrees, ends, strict=True)]


# -- the performance model of a graph whose user names none

TINY_CPU = "tiny-cpu"
"""The profile of the tiny model, measured on a CPU."""


def default_perf(model: str) -> str:
    """`tiny-cpu` for the tiny model, else the analytic model of a folder on this machine's GPUs, as `FOLDER@GPU`.

    Args:
        model: a model folder, or `tiny`.

    Raises:
        UserError: the GPUs are of no known kind or of several, or the folder's model has no analytic one. The part
            behind the last `; ` says what to do.
    """
    if model == TINY:
        return TINY_CPU
    folder = Path(model).expanduser().resolve()
    names = _gpu_names()
    presets = {preset_of(name) for name in names}
    known = presets.pop() if len(presets) == 1 else None
    if known is None:
        raise UserError(
            f"--perf: the times of {folder.name} cannot be derived, because this machine has "
            f"{' and '.join(names) or 'no GPU that nvidia-smi lists'}; one kind of {', '.join(GPUS)} is needed; "
            f"name model and GPU, as in --perf {folder}@h200 or --perf qwen3-32b@h20, or give --perf FILE, which `ampd "
            "profile` writes"
        )
    perf = f"{folder}@{known}"
    try:
        load_performance_model(perf)
    except UserError as error:
        raise UserError(
            f"--perf: {error}; give --perf FILE, which `ampd profile` writes, or name the nearest model, as in "
            f"--perf qwen3-32b@{known}"
        ) from None
    return perf


def _gpu_names() -> list[str]:
    try:
        return sorted({gpu.name for gpu in found_gpus()})
    except UserError:  # `ampd doctor` shows it
        return []
