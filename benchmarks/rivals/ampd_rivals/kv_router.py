"""The cost function of Dynamo's KV-aware router, as a binding."""

from __future__ import annotations

from pydantic import Field

from ampd.policies.base import BindingSituation
from ampd.policies.estimates import fits, index_of_least
from ampd.policies.registry import Policy, register
from ampd.types import WorkerView


@register("binding", "kv-router")
class KvRouterBinding(Policy):
    """Bind a session where the tokens still to prefill and the tokens that decode are the fewest.

    After NVIDIA Dynamo's KV router (`components/router`, 1.x), which routes single requests.

    Reads: queue and decode batch of every decode worker, its KV memory and longest context; the prompt, and how much of
    it each worker holds for other sessions.

    Rule: the worker with the least sum of two terms wins. The first is `overlap_weight` times the tokens that wait for
    their prefill there, and the tokens of this prompt that the worker does not hold. The second is the tokens of all
    contexts that decode there, and of this prompt. Workers whose free KV memory and context length take the whole
    prompt come first. Of equal workers it takes a random one.

    What the source says: `overlap_score_weight * prefill_blocks + decode_blocks`, per request, from the blocks that
    each worker reports, or that the router assumes. A temperature may soften the choice.

    Our reading: the choice is made once per session, because the session's own KV is there afterwards, and the source's
    cost would choose the same worker again unless it is much busier. Workers publish the prefixes that two sessions
    have used, and not every block. There is no temperature.

    Limits: tokens of prefill and of decode cost the same, whatever the hardware. Targets are not read.

    Example: `--binding kv-router`, with `--routing always-local` or `--routing always-remote`
    """

    overlap_weight: float = Field(1.0, ge=0, description="Weight of the tokens to prefill against those that decode.")

    def bind(self, situation: BindingSituation) -> str:
        task, shared = situation.task, situation.shared_tokens
        roomy = [worker for worker in situation.decode if fits(worker, task, shared.get(worker.worker_id, 0))]
        roomy = roomy or list(situation.decode)
        return roomy[index_of_least([self._cost(situation, worker) for worker in roomy], situation.rng)].worker_id

    def _cost(self, situation: BindingSituation, worker: WorkerView) -> float:
        prompt_tokens = situation.task.context_tokens
        held_tokens = situation.shared_tokens.get(worker.worker_id, 0)
        waiting_tokens = sum([task.incr_tokens for task in worker.queue]) + worker.queue_rest.incr_tokens
        prefill_tokens = waiting_tokens + prompt_tokens - held_tokens
        return self.overlap_weight * prefill_tokens + worker.decode_context_tokens + prompt_tokens
