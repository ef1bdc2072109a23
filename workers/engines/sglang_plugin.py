"""What AMPD changes in SGLang, through its plugin entry point: SGLang calls `register` in every one of its processes.

Grammars with bounded costs, the digests of pages where SGLang's extension for them cannot be built, and where the
ranks' store listens. A rank that does not start tells the worker why. The slicing policy sizes the passes that prefills
share with the batch. On machines without a GPU also the rotary
embedding, and a size of the memory that does not change.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from types import ModuleType
from typing import Any

from ampd.errors import one_line_of
from workers.engines import page_digests
from workers.engines.loopback_store import on_loopback

log = logging.getLogger(__name__)

ENGINE_FLAG = "AMPD_SGLANG_ENGINE"
"""Set by AMPD in the environment of its own engines; without it the plugin leaves SGLang as it is."""


def register() -> None:
    if os.environ.get(ENGINE_FLAG) != "1":
        return
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from workers.engines.bounded_grammars import BoundedBackend
    from workers.engines.sglang_passes import defer_prefill, sized_prefill

    digests = "sglang.srt.mem_cache.cpp_utils.native_hash._load_native_hash_module"
    on_gpu = torch.cuda.is_available()
    grammars = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend"
    HookRegistry.register(grammars, BoundedBackend, HookType.REPLACE)
    HookRegistry.register(digests, native_or_hashlib if on_gpu else with_hashlib, HookType.AROUND)
    HookRegistry.register("torch.distributed.rendezvous._create_c10d_store", on_loopback, HookType.AROUND)
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.__init__", tell_failure, HookType.AROUND)
    HookRegistry.register(f"{scheduler}._should_defer_prefill", defer_prefill, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.get_new_batch_prefill", sized_prefill, HookType.AROUND)
    if not on_gpu:
        HookRegistry.register("sglang.srt.utils.common.get_free_cpu_memory", memory_bytes, HookType.AROUND)
        rotary = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.__init__"
        HookRegistry.register(rotary, with_torch_rotary, HookType.AROUND)


def with_hashlib(_load: Any) -> Any:
    """Our module for digests: beside an engine on the CPU they cost nothing, and the build delays the first start."""
    return page_digests


@cache  # a build that fails is not tried again at each look-up
def native_or_hashlib(load: Any) -> Any:
    """SGLang's compiled module for digests, or ours where it cannot be built (no compiler, ninja or headers)."""
    try:
        return load()
    except RuntimeError as error:
        reason = error.__cause__ or error
        log.warning("digests of pages use hashlib because SGLang's extension was not built: %s", reason)
        return page_digests


def tell_failure(original: Any, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell the worker why a rank does not start: by itself SGLang only reports that the rank has ended."""
    from sglang.srt.runtime_context import get_parallel

    from workers.kv.ranks.link import refuse

    try:
        return original(scheduler, server_args, *args, **kwargs)
    except Exception as error:
        rank = get_parallel().tp_rank
        linker = server_args.unified_cache_external_linker_config["linker_extra_config"]
        refuse(linker["control"][rank], rank, one_line_of(error))
        raise


def memory_bytes(_free: Any) -> int:
    """The machine's memory, or the container's if that is less: what SGLang takes for free memory on a CPU.

    SGLang looks several times while an engine starts. It refuses to start if less and less memory is free, and each
    rank looks at another time. But the ranks, other engines and the page cache use the same memory meanwhile.
    """
    from sglang.srt.utils.common import get_instance_memory_status

    limit = get_instance_memory_status("/sys/fs/cgroup/memory.max")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total if limit is None else min(total, limit)


def with_torch_rotary(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Where SGLang falls back to vLLM's compiled kernel (absent here), give it the same function in torch."""
    name = "vllm._custom_ops"
    if name in sys.modules:
        return original(*args, **kwargs)
    stand_in = ModuleType(name)
    stand_in.rotary_embedding = rotary_embedding  # type: ignore[attr-defined]
    sys.modules[name] = stand_in
    try:
        return original(*args, **kwargs)
    finally:
        del sys.modules[name]


def rotary_embedding(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox_style: bool
) -> None:
    """Rotate query and key in place.

    Args:
        positions: [tokens].
        query, key: [tokens, heads * head_size], rotated in the first `rotary` dimensions of each head.
        cos_sin_cache: [positions, rotary]: cosines, then sines.
        is_neox_style: halves of the head are the pairs; otherwise neighbours are.
    """
    import torch

    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotary = 2 * cos.shape[-1]
    for states in (query, key):
        heads = states.view(positions.numel(), -1, head_size)[..., :rotary]
        first, second = heads.chunk(2, dim=-1) if is_neox_style else (heads[..., ::2], heads[..., 1::2])
        pair = first * cos - second * sin, second * cos + first * sin
        heads.copy_(torch.cat(pair, dim=-1) if is_neox_style else torch.stack(pair, dim=-1).flatten(-2))
