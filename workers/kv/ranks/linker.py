"""SGLang's side of the KV store: a cache linker in the scheduler process of each rank.

SGLang offers the pages of its radix cache when they are computed. They are copied into the worker's store at once, and
nothing stays locked on the device. Pages that a request needs come back from the store: a look-up is a dictionary
hit, a load is a local copy, and nothing here waits for the network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__

from ampd.model_folder import model_digest
from ampd.types import Factors
from workers.kv.ranks.copies import NeighbourStores, PageLoader, RankCopies, pin
from workers.kv.ranks.link import Offered, RankLink
from workers.kv.ranks.pools import check_tried, engine_pools
from workers.kv.shared import StoreMemory, restorable_lengths


class KvLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Copies offered pages into the store and loads the pages that the worker protects for a request.

    Args:
        extra_config: `control` (address of the worker's socket, by rank) and `store` (process id, file descriptor and
            bytes of the store), `allow_untested` (whether KV that was never tried is taken), `passes` (see below).

    Attributes:
        passes: what the sizes of shared passes depend on (`workers.engines.sglang_passes`); None: SGLang's own.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,  # noqa: ARG002
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        self.forward_stream = forward_stream
        self.page_size = int(params.page_size)
        self.passes: Mapping[str, str] | None = extra_config.get("passes")
        rank = _rank(params)
        model = ModelConfig.from_server_args(server_args)
        pools = engine_pools(server_args, params, model, engine_fingerprint(server_args))
        if not extra_config["allow_untested"]:
            pool = params.token_to_kv_pool_allocator.get_kvcache()
            check_tried(pool, self.page_size, pools.tp, chunk_tokens=model.attention_chunk_size)
        # SGLang leaves out the transfers of pools that are not named here.
        self.pools = {PoolName(name): None for name in pools.buffers}
        self._memory = StoreMemory.open(*extra_config["store"])
        store = torch.frombuffer(self._memory.map, dtype=torch.uint8)
        self._on_gpu = torch.cuda.is_available()
        warnings = pin(store) if self._on_gpu else []
        copies = RankCopies(pools.geometry, pools.buffers, store, tp=pools.tp, rank=rank, layers=pools.layers)
        neighbours = NeighbourStores(copies, on_gpu=self._on_gpu)
        self._link = RankLink(extra_config["control"][rank], rank, pools.geometry, copies, neighbours, warnings)
        self.layer_done_counter = self._loader = PageLoader(copies, self._link, forward_stream)
        if PoolName.MAMBA in self.pools:
            # SGLang itself lets only the attention layers wait for their loads.
            params.req_to_token_pool.register_layer_transfer_counter(self._loader)

    # -- loads

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        loadable = self._link.loadable(rid).records
        pages, *trailing = ((loadable.get(transfer.name.value, {}), transfer.keys) for transfer in transfers)
        return restorable(*pages, trailing)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        self._link.begin_load(rid)
        loadable = self._link.loadable(rid)
        load = {
            name: (self._slots(name, transfer.device_indices), [loadable.records[name][key] for key in transfer.keys])
            for name, transfer in ((transfer.name.value, transfer) for transfer in transfers)
        }
        self._loader.queue(rid, load, loadable.until_s)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self._loader.cancel(rid)

    def start_layer_wise_loading(self) -> int:
        return self._loader.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._loader.finish(counter_index)

    # -- offloads

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        if session_id is None:
            return False
        ready = self.record_offload_ready() if self._on_gpu else []
        indices = {transfer.name.value: transfer.device_indices for transfer in transfers}

        def slots() -> Mapping[str, Sequence[int]]:
            for event in ready:
                event.synchronize()
            return {name: self._slots(name, values).tolist() for name, values in indices.items()}

        keys = {transfer.name.value: bytes.fromhex("".join(transfer.keys)) for transfer in transfers}
        self._link.offer(Offered(session_id, keys, slots))
        return True

    def num_completed_offloads(self) -> int:
        return len(self._link.completed)

    def pop_completed_offload(self) -> bool:
        return self._link.completed.popleft()

    # -- passes

    def tell_passes(self, parts: Sequence[tuple[str, int, bool]]) -> None:
        """Tell the worker that a pass over prefills begins, as `workers.kv.rank_messages.Passes` says."""
        self._link.tell_passes(parts)

    def tell_factors(self, factors: Factors) -> None:
        """Tell the worker how its times are corrected by those of the passes."""
        self._link.tell_factors(factors)

    # -- lifecycle

    def reset(self) -> None:
        self._loader.reset()
        self._link.reset()

    def close(self) -> None:
        self.reset()
        self._loader.close()
        self._link.close()
        self._memory.close()

    def _slots(self, pool: str, indices: Any) -> Any:
        """Slots as they are, on the device: to read them here would wait for it."""
        return indices if pool == "mamba" else indices[:: self.page_size] // self.page_size


def _rank(params: Any) -> int:
    """This process' rank among those that share out the heads."""
    group = params.attn_tp_cache_group or params.tp_cache_group
    return 0 if group is None else int(torch.distributed.get_rank(group=group))


def restorable(
    loadable: Mapping[str, int], keys: Sequence[str], trailing: Sequence[tuple[Mapping[str, int], Sequence[str]]]
) -> list[int]:
    """Every length in pages of a prefix of `keys` that can be loaded.

    Args:
        loadable: by key, what may be loaded of the pool that needs every page.
        trailing: of each other pool, what may be loaded, and the last keys of `keys`: as many as its window has.
    """
    pages = next((at for at, key in enumerate(keys) if key not in loadable), len(keys))
    attention_windows = [(len(window), partial(_has, found, keys)) for found, window in trailing]
    return list(restorable_lengths(pages, attention_windows))


def _has(found: Mapping[str, int], keys: Sequence[str], page: int) -> bool:
    return keys[page] in found


_NAMES = frozenset(
    {
        "model_path",
        "tokenizer_path",
        "revision",
        "load_format",
        "model_loader_extra_config",
        "custom_weight_loader",
        "model_impl",
        "json_model_override_args",
        "decrypted_config_file",
        "decrypted_draft_config_file",
        "dtype",
        "quantization",
        "quantization_param_path",
        "modelopt_quant",
        "modelopt_checkpoint_restore_path",
        "rl_quant_profile",
        "kv_cache_dtype",
        "page_size",
        "enable_lora",
        "lora_paths",
        "uno_lora_path",
        "kt_weight_path",
        "kt_method",
    }
)
_PREFIX = "speculative_"


def engine_fingerprint(server_args: Any) -> str:
    """A digest of the weights, the settings and the SGLang version of an engine.

    Args:
        server_args: SGLang's arguments as they are in effect, whichever flag set them. A path counts by its contents.
    """
    names = [name for name in ServerArgs.__struct_fields__ if name in _NAMES or name.startswith(_PREFIX)]
    settings = {name: _described(getattr(server_args, name, None)) for name in names}
    return sha256(json.dumps([__version__, settings], sort_keys=True).encode()).hexdigest()


def _described(value: Any) -> Any:
    """A value without what differs between equal workers: the place of files, and random names of adapters."""
    if hasattr(value, "lora_path"):
        return [value.lora_name, _described(value.lora_path)]
    if isinstance(value, dict):
        return {str(key): _described(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    text = str(value)
    if os.path.exists(text):  # noqa: PTH110 - unlike Path.exists, it takes a text that is too long for a path
        return model_digest(Path(text))
    name, is_named, path = text.partition("=")
    return [name, _described(path)] if is_named and os.path.exists(path) else text  # noqa: PTH110 - as above
