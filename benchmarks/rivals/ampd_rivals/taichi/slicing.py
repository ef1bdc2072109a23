"""TaiChi's chunked prefill, with a chunk size per kind of worker."""

from __future__ import annotations

from pydantic import Field

from ampd.policies.base import Compute, Slice, SlicingSituation
from ampd.policies.registry import register
from ampd_rivals.taichi.chunks import ChunkSizes


@register("slicing", "taichi")
class TaiChiSlicing(ChunkSizes):
    """Cut prefills into large chunks on prefill-heavy workers and into small ones on decode-heavy workers.

    After TaiChi (arXiv 2508.01989).

    Reads: the role of the worker.

    Rule: `prefill_heavy_tokens` on a mixed or prefill worker, `decode_heavy_tokens` on a decode worker, with or without
    a batch. The batch makes a step between two chunks, or with `mixes` in the pass of each chunk.

    What the source says: chunked prefill in two sizes. They are found by search for a workload and its targets, so that
    equal sizes make an aggregated system, and a decode-heavy size of 0 a disaggregated one. The defaults here are ours.

    Limits: a chunk and the decode step share one pass in the source. Here they do so only with `mixes`, and only the
    simulated engine mixes. In a live graph the batch pauses. The routing expects a step after each chunk either way.

    Example: `--slicing taichi`, with `--routing taichi` and `--binding taichi`
    """

    mixes: bool = Field(False, description="A chunk shares its pass with a step of the batch, which does not pause.")

    def slice(self, situation: SlicingSituation) -> Slice:
        tokens = min(self.chunk_tokens(situation.role), situation.task.incr_tokens)
        return Compute(tokens, mixes=self.mixes)
