"""Divides the GPUs or the CPU cores of this machine among the workers of a local graph."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from itertools import accumulate

from ampd.errors import UserError

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """Ids of the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` takes them; empty without NVIDIA GPUs."""
    chosen = os.environ.get(GPUS_VARIABLE)
    if chosen is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return listing.stdout.split() if listing.returncode == 0 else []


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
