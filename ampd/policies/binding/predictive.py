"""Binding by what a session will meet: room for its KV first, then the decode worker with the most time to spare."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.binding.least_kv import fits
from ampd.policies.estimates import one_of_least, queued_s
from ampd.policies.registry import Policy, register
from ampd.types import PrefillTask, WorkerView


@register("binding", "predictive")
class PredictiveBinding(Policy):
    """Bind a session to the decode worker that is predicted to be the least loaded with it, in time and in memory.

    Reads: decode batch and its context, queue, used and total KV memory and longest context of every decode worker; the
    prompt; the targets; prefill and step times of the performance model.

    Rule: workers whose free KV memory and context length take the whole prompt come first. Among them the least sum of
    three shares: the modelled step of the batch with the session in it, of the ITL target; the queued local prefills,
    of the TTFT target; `memory_weight` times the KV memory in use with the session in it, of the whole. Of equals one
    at random. Shares make workers of different sizes comparable, where `least-kv` counts tokens.

    Limits: sessions stay where they are bound, and how long they will grow is not known. Between two rounds a session
    counts with its memory and not with its time, for nobody knows when it comes back.

    Example: `--binding predictive`
    """

    memory_weight: float = Field(1.0, ge=0, description="Weight of the memory's share against those of time.")

    def bind(
        self,
        task: PrefillTask,
        decode: Sequence[WorkerView],
        model: PerformanceModel,
        now_s: float,  # noqa: ARG002
        rng: random.Random,
    ) -> str:
        """The chosen worker's id."""
        roomy = [worker for worker in decode if fits(worker, task)] or list(decode)
        return roomy[one_of_least([self._load(task, worker, model) for worker in roomy], rng)].worker_id

    def _load(self, task: PrefillTask, worker: WorkerView, model: PerformanceModel) -> float:
        context_tokens = worker.decode_context_tokens + task.context_tokens
        step_s = model.decode_step_s(worker.decode_batch + 1, context_tokens, worker.parallelism)
        memory = 0.0
        if worker.kv_capacity_tokens:
            memory = (worker.kv_used_tokens + task.context_tokens) / worker.kv_capacity_tokens
        return step_s / task.slo.itl_s + queued_s(worker, model) / task.slo.ttft_s + self.memory_weight * memory
