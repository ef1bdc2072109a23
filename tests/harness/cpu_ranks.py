"""What lets an engine of SGLang have several ranks on a CPU: no NCCL, cores for each rank, replicated KV heads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

_CORES = "SGLANG_CPU_OMP_THREADS_BIND"
"""SGLang's variable: the CPU cores of each rank, as in `0,1|2,3`."""


def register() -> None:
    """Register the hooks in a process of SGLang's, before it loads its plugins, ours among them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    group = "sglang.srt.distributed.parallel_state.GroupCoordinator.__init__"
    HookRegistry.register(group, without_nccl, HookType.AROUND)
    binding = "sglang.srt.utils.numa_utils.init_threads_binding"
    HookRegistry.register(binding, divide_cores, HookType.BEFORE)
    padding = "sglang.srt.model_executor.model_runner.adjust_config_with_unaligned_cpu_tp"
    HookRegistry.register(padding, replicate_kv_heads, HookType.AROUND)


def without_nccl(original: Any, *args: Any, **kwargs: Any) -> None:
    """Make a group of ranks without NCCL, which needs a GPU. Gloo remains."""
    original(*args, **{**kwargs, "use_pynccl": False})


def divide_cores(*, numa_index: int, world_size: int) -> None:
    """Give each rank its cores, unless the user did: by itself SGLang wants as many NUMA nodes as ranks."""
    del numa_index
    if world_size > 1:
        os.environ.setdefault(_CORES, cores_of_ranks(sorted(os.sched_getaffinity(0)), world_size))


def cores_of_ranks(cores: Sequence[int], ranks: int) -> str:
    """The cores, divided among the ranks in order. With fewer cores than ranks each rank gets one, and ranks share."""
    if len(cores) < ranks:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    bounds = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    return "|".join(",".join(map(str, cores[first:end])) for first, end in pairwise(bounds))


def replicate_kv_heads(original: Any, model_config: Any, load_config: Any, tp_size: int) -> Any:
    """Leave the model's heads as they are, so that KV heads are replicated on surplus ranks as on a GPU.

    On the CPU SGLang pads the number of KV heads to the number of ranks. The loader of the weights then fails.
    """
    return original(model_config, load_config, tp_size) if tp_size == 1 else model_config
