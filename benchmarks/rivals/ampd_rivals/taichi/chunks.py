"""The chunk sizes of the two kinds of instances, and how long prefills take in chunks."""

from __future__ import annotations

from math import ceil

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.registry import Policy
from ampd.types import Role, WorkerView


class ChunkSizes(Policy):
    """Two of the source's three sliders. The third is the number of workers of each kind."""

    prefill_heavy_tokens: int = Field(2048, ge=1, description="Chunk of a mixed or prefill worker.")
    decode_heavy_tokens: int = Field(256, ge=1, description="Chunk of a decode worker.")

    def chunk_tokens(self, role: Role) -> int:
        """The longest chunk on a worker of a role."""
        return self.prefill_heavy_tokens if role.takes_prefills else self.decode_heavy_tokens

    def queued_s(self, worker: WorkerView, model: PerformanceModel) -> float:
        """Time of all prefills at a worker, each in its chunks."""
        total_s = sum([self.prefill_s(worker, task.hist_tokens, task.incr_tokens, model) for task in worker.queue])
        if tasks := worker.queue_rest.tasks:
            rest = worker.queue_rest
            mean_s = self.prefill_s(worker, rest.hist_tokens // tasks, rest.incr_tokens // tasks, model)
            total_s += tasks * mean_s
        return total_s

    def prefill_s(self, worker: WorkerView, hist_tokens: int, incr_tokens: int, model: PerformanceModel) -> float:
        """Time of one prefill in chunks, with a step of the worker's decode batch after each.

        A chunk in the middle of the increment stands for all of them.
        """
        chunk_tokens = min(self.chunk_tokens(worker.role), incr_tokens)
        if not chunk_tokens:
            return 0.0
        middle_tokens = hist_tokens + (incr_tokens - chunk_tokens) // 2
        chunk_s = model.prefill_s(middle_tokens, chunk_tokens, worker.parallelism)
        if worker.decode_batch:
            chunk_s += model.decode_step_s(worker.decode_batch, worker.decode_context_tokens, worker.parallelism)
        return ceil(incr_tokens / chunk_tokens) * chunk_s
