"""What AMPD changes in SGLang, through its plugin entry point: SGLang calls `register` in every one of its processes.

Grammars with bounded costs, and where the ranks' store listens. A rank that does not start tells the worker why. The
slicing policy sizes the passes that prefills share with the batch, and passes are timed. On machines without a GPU also
the digests of pages, the rotary embedding, and a size of the memory that does not change.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from types import ModuleType, SimpleNamespace
from typing import Any

from ampd.call_signatures import is_loopback_address
from ampd.errors import one_line_of
from ampd.perf.corrections import MIXED, PREFILL, STEP, CorrectedModel
from ampd.perf.model import joined_tokens
from workers.engines.sglang_passes import passes_of

# -- How long SGLang's passes take: measured in its scheduler, by hooks around two of its methods.
#
# A pass begins when SGLang launches it, or when the pass before it ends if that is later. It ends when SGLang has its
# results. The scheduler of rank 0 corrects its own times with that, by which it sizes passes, and tells the worker.


@dataclass(frozen=True, slots=True)
class LaunchedPass:
    """A pass that SGLang has launched.

    Attributes:
        parts: (history, new tokens) of each prefill.
        batch, context_tokens: of the step.
    """

    launched_s: float
    parts: list[tuple[int, int]]
    batch: int
    context_tokens: int

    @property
    def kind(self) -> int:
        return (MIXED if self.batch else PREFILL) if self.parts else STEP

    def predicted_s(self, times: CorrectedModel) -> float:
        """Its time as it is predicted now."""
        parallelism = times.parallelism
        if not self.parts:
            return times.decode_step_s(self.batch, self.context_tokens, parallelism)
        if not self.batch:
            return times.prefill_s(*joined_tokens(self.parts), parallelism)
        return times.mixed_pass_s(self.parts, self.batch, self.context_tokens, parallelism)


def launched_pass(batch: Any, now_s: float) -> LaunchedPass | None:
    """A batch of SGLang as a pass; None: its time is not that of its computation, because it also loads KV."""
    if batch.hicache_consumer_index >= 0 or not batch.reqs:
        return None
    mode = batch.forward_mode
    if mode.is_decode():
        return LaunchedPass(now_s, [], len(batch.reqs), _context_tokens(batch.reqs))
    if not mode.is_extend():
        return None
    beside = batch.decoding_reqs or []
    prefills = len(batch.reqs) - len(beside)
    parts = list(zip(batch.prefix_lens[:prefills], batch.extend_lens[:prefills], strict=True))
    return LaunchedPass(now_s, parts, len(beside), _context_tokens(beside))


def _context_tokens(requests: Any) -> int:
    return sum(len(request.origin_input_ids) + len(request.output_ids) for request in requests)


# -- hooks in SGLang's scheduler


def note_launch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler.run_batch`: the result gets the pass."""
    launched = launched_pass(batch, time.monotonic())
    result = original(scheduler, batch, *args, **kwargs)
    result.ampd_launched = launched
    return result


def note_end(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> None:
    """Around `Scheduler.process_batch_result`, which waits for the results."""
    original(scheduler, batch, result)
    now_s = time.monotonic()
    before_s, scheduler.ampd_ended_s = getattr(scheduler, "ampd_ended_s", 0.0), now_s
    launched: LaunchedPass | None = getattr(result, "ampd_launched", None)
    passes = passes_of(scheduler)
    times = passes.times
    if launched is None or times is None:
        return
    known = times.parallelism
    times.measured(launched.kind, launched.predicted_s(times), now_s - max(launched.launched_s, before_s))
    if times.parallelism is not known:
        passes.linker.tell_factors(times.parallelism.factors)


ENGINE_FLAG = "AMPD_SGLANG_ENGINE"
"""Set by AMPD in the environment of its own engines; without it the plugin leaves SGLang as it is."""


def register() -> None:
    if os.environ.get(ENGINE_FLAG) != "1":
        return
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from workers.engines.bounded_grammars import BoundedBackend
    from workers.engines.sglang_passes import defer_prefill, sized_prefill

    grammars = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend"
    HookRegistry.register(grammars, BoundedBackend, HookType.REPLACE)
    HookRegistry.register("torch.distributed.rendezvous._create_c10d_store", on_loopback, HookType.AROUND)
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.__init__", tell_failure, HookType.AROUND)
    HookRegistry.register(f"{scheduler}._should_defer_prefill", defer_prefill, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.get_new_batch_prefill", sized_prefill, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.run_batch", note_launch, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.process_batch_result", note_end, HookType.AROUND)
    if not torch.cuda.is_available():
        digests = "sglang.srt.mem_cache.cpp_utils.native_hash._load_native_hash_module"
        HookRegistry.register(digests, with_hashlib, HookType.AROUND)
        HookRegistry.register("sglang.srt.utils.common.get_free_cpu_memory", memory_bytes, HookType.AROUND)
        rotary = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.__init__"
        HookRegistry.register(rotary, with_torch_rotary, HookType.AROUND)


def with_hashlib(_load: Any) -> Any:
    """Our function for digests: beside an engine on the CPU it costs nothing, and SGLang's own has to be compiled."""
    return SimpleNamespace(get_hash=get_hash)


def get_hash(
    raw_tokens: array[int],
    logical_len: int,
    _unit_width: int,
    _is_bigram: bool,
    prior_digest: bytes | None,
    page_size: int | None = None,
) -> str | list[str]:
    """Chained SHA-256 digests of token pages, as SGLang's `hash_binding.cpp` makes them for units of one token.

    Args:
        raw_tokens: token ids of 32 bits; may be longer than needed.
        logical_len: tokens to hash.
        prior_digest: digest of what precedes the tokens (32 bytes).

    Returns:
        The hexadecimal digest of each page, or one digest of all tokens without `page_size`.
    """
    words = memoryview(array("I", raw_tokens[:logical_len])).cast("B")
    digest, digests = prior_digest or b"", []
    if page_size is None:
        return sha256(digest + words).hexdigest()
    for start in range(0, len(words), 4 * page_size):
        digest = sha256(digest + words[start : start + 4 * page_size]).digest()
        digests.append(digest.hex())
    return digests


def on_loopback(
    original: Any, hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
) -> Any:
    """Make the store by which ranks meet as `original` (`torch.distributed.rendezvous._create_c10d_store`) does.

    Where the ranks meet at a loopback address, the store of the first rank listens there and nowhere else. By itself
    torch listens on all addresses.
    """
    if rank or not is_loopback_address(hostname):
        return original(hostname, port, rank, world_size, timeout, use_libuv)
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    listener = socket.create_server((hostname, port), family=family)
    return TCPStore(
        host_name=hostname,
        port=listener.getsockname()[1],
        world_size=world_size,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        use_libuv=use_libuv,
        master_listen_fd=listener.detach(),
    )


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


def with_torch_rotary(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Let a layer use its function in torch. SGLang would take vLLM's compiled kernel, which is absent here."""
    name = "vllm._custom_ops"
    stand_in = ModuleType(name)
    stand_in.rotary_embedding = None  # type: ignore[attr-defined]
    sys.modules[name] = stand_in
    try:
        original(layer, *args, **kwargs)
    finally:
        del sys.modules[name]
    layer._forward_method = layer.forward_native
