"""Divides the GPUs or the CPU cores of this machine among the workers of a local graph."""

from __future__ import annotations

import os
import shutil
import subprocess

from ampd.errors import UserError


def visible_gpus() -> list[str]:
    """Ids of the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` takes them; empty without NVIDIA GPUs."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return listing.stdout.split() if listing.returncode == 0 else []


def worker_environments(workers: int, tp: int, gpus: list[str], cpus: int) -> list[dict[str, str]]:
    """The environment that gives each of `workers` processes its devices.

    With GPUs each worker gets `tp` of them, in order; a single GPU may be shared by all workers of degree 1. Without
    GPUs the CPU's cores are split evenly, so that engines do not compete for them.

    Raises:
        UserError: fewer GPUs than `workers * tp`.
    """
    if not gpus:
        threads = str(max(1, cpus // workers))
        return [{"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} for _ in range(workers)]
    if len(gpus) == 1 and tp == 1:
        return [{"CUDA_VISIBLE_DEVICES": gpus[0]} for _ in range(workers)]
    if len(gpus) < workers * tp:
        raise UserError(
            f"ampd serve: {workers} workers at --tp {tp} need {workers * tp} GPUs, this machine shows {len(gpus)}; "
            "use fewer workers or a smaller --tp"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * tp : (i + 1) * tp])} for i in range(workers)]
