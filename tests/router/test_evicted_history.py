"""A session whose KV was evicted: what its next round counts as recomputed."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from ampd.tiny_model import tiny_model_path
from tests.memory_store import MemoryState
from tests.router.replica_lab import Replica
from tests.router.site_lab import Site
from tests.workers.engines.modelled_lab import Lab, Times, prompt_of
from tests.workers.parts_lab import worker_parts

PAGE = 16


@pytest.mark.parametrize("routing", ["always-local", "always-remote"])
async def test_an_evicted_history_counts_as_recomputed(routing: str) -> None:
    lab = Lab(tiny_model_path(), Times())
    async with AsyncExitStack() as stack:
        parts = {
            name: worker_parts(name, await stack.enter_async_context(lab.engine(name, 640, 640)), lab.times, role=role)
            for name, role in (("d", "decode"), ("p", "prefill"))
        }
        replica = await stack.enter_async_context(Replica(MemoryState(), routing))
        site = Site(replica, parts)
        await site.publish()
        first = prompt_of(400)
        output, _ = await site.round("evicted", first)
        await site.publish()
        await site.round("other", prompt_of(560, seed=2))
        await site.publish()
        # The last token of an output has no KV.
        context_pages = (len(first) + len(output) - 1) // PAGE
        held = await site.held("d", "evicted")
        assert held < context_pages * PAGE

        prefills = parts["p" if routing == "always-remote" else "d"]
        before = prefills.read_view().kv_window.recomputed_tokens
        context = first + output
        _, made = await site.round("evicted", context + prompt_of(64, seed=3))
        assert (made["hist_tokens"], made["kept_tokens"]) == (held, len(context))
        hits = made["hit_tokens"]
        assert hits["recomputed"] == context_pages * PAGE - made["cached_tokens"] > 0
        assert prefills.read_view().kv_window.recomputed_tokens - before == hits["recomputed"]
