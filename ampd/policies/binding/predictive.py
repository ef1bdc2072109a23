"""Binding by predicted load: room for the session's KV first, then the decode worker with the most time to spare."""

from __future__ import annotations

from ampd.policies.base import BindingSituation
from ampd.policies.estimates import fits, index_of_least, queued_s, session_memory, step_with_s
from ampd.policies.registry import Policy, register
from ampd.types import WorkerView, usable_tokens


@register("binding", "predictive")
class PredictiveBinding(Policy):
    """Bind a session to the decode worker that is predicted to be the least loaded with it, in time and in memory.

    Reads: decode batch and its context, queue, used and total KV memory and longest context of every decode worker;
    the prompt, and how much of it each of them holds for other sessions; the targets; prefill and step times of the
    performance model.

    Rule: workers whose free KV memory and context length take the whole prompt come first. Among them the worker
    with the least sum of three shares is chosen:

    1. the modelled step of the batch with the session in it, as a share of the ITL target;
    2. the time of the queued local prefills, as a share of the TTFT target;
    3. the KV memory in use with the session in it, as a share of the whole.

    The part of the prompt that the worker holds for other sessions needs no memory, and the prefill time that it
    saves is taken off the sum. Of equal workers it takes a random one.

    Limits: it decides once per session, and how long a session will grow is not known. Between two rounds a session
    counts with its memory only.

    Example: `--binding predictive`
    """

    def bind(self, situation: BindingSituation) -> str:
        workers = roomy(situation)
        return workers[index_of_least([self.load(situation, worker) for worker in workers], situation.rng)].worker_id

    def load(self, situation: BindingSituation, worker: WorkerView) -> float:
        """The sum of a worker's shares with the session, less what a shared prefix saves."""
        step, queue, memory = self.shares(situation, worker)
        load = step + queue + memory
        shared_tokens = situation.shared_tokens.get(worker.worker_id, 0)
        if not shared_tokens:
            return load
        return load - self._saved_s(situation, worker, shared_tokens) / situation.task.slo.ttft_s

    def shares(self, situation: BindingSituation, worker: WorkerView) -> tuple[float, float, float]:
        """The shares of the ITL target, of the TTFT target and of the memory that a worker uses with the session."""
        task, model = situation.task, situation.model
        shared_tokens = situation.shared_tokens.get(worker.worker_id, 0)
        step_s = step_with_s(model, worker, task.context_tokens)
        memory = 0.0
        used_tokens, capacity_tokens = session_memory(worker)
        if capacity_tokens:
            memory = (used_tokens + task.context_tokens - shared_tokens) / capacity_tokens
        return step_s / task.slo.itl_s, queued_s(worker, model) / task.slo.ttft_s, memory

    def _saved_s(self, situation: BindingSituation, worker: WorkerView, shared_tokens: int) -> float:
        """Prefill time that the shared prefix saves at this worker."""
        task, model = situation.task, situation.model
        hist_tokens = usable_tokens(shared_tokens, task.context_tokens)
        whole_s = model.prefill_s(0, task.context_tokens, worker.parallelism)
        return whole_s - model.prefill_s(hist_tokens, task.context_tokens - hist_tokens, worker.parallelism)


def roomy(situation: BindingSituation) -> list[WorkerView]:
    """The workers whose free memory takes the prompt; all of them if none does."""
    task, shared = situation.task, situation.shared_tokens
    workers = [worker for worker in situation.decode if fits(worker, task, shared.get(worker.worker_id, 0))]
    return workers or list(situation.decode)
