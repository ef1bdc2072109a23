"""TaiChi's chunked prefill, with a chunk size per kind of worker."""

from __future__ import annotations

from ampd.policies.base import SlicingSituation
from ampd.policies.registry import register
from ampd_rivals.taichi.chunks import ChunkSizes


@register("slicing", "taichi")
class TaiChiSlicing(ChunkSizes):
    """Cut prefills into large chunks on prefill-heavy workers and into small ones on decode-heavy workers.

    After TaiChi (arXiv 2508.01989).

    Reads: the role of the worker.

    Rule: `prefill_heavy_tokens` on a mixed or prefill worker, `decode_heavy_tokens` on a decode worker, with or without
    a batch.

    What the source says: chunked prefill in two sizes. They are found by search for a workload and its targets, so that
    equal sizes make an aggregated system, and a decode-heavy size of 0 a disaggregated one. The defaults here are ours.

    Limits: as in the source a chunk shares its pass with a step of the batch, but only where that is predicted to save
    time. SGLang knows only the role with which its worker began.

    Example: `--slicing taichi`, with `--routing taichi` and `--binding taichi`
    """

    def slice(self, situation: SlicingSituation) -> int:
        return min(self.chunk_tokens(situation.role), situation.task.incr_tokens)
