"""The static threshold of Dynamo's conditional disaggregation and of llm-d: short increments stay local."""

from __future__ import annotations

from pydantic import Field

from ampd.policies.base import RoutingSituation
from ampd.policies.estimates import NO_PREFILL_WORKER, able, least_queued, local
from ampd.policies.registry import Policy, register
from ampd.types import RouteDecision


@register("routing", "threshold")
class ThresholdRouting(Policy):
    """Prefill a round locally if its increment is short, both in tokens and as a part of its prompt; else remotely.

    Reads: history and increment of the round; queue, held prefix and longest context of every prefill worker; prefill
    times of the performance model, for the queues.

    Rule:

    1. `under-threshold`: local if the tokens that the session's decode worker lacks are fewer than `tokens`, and fewer
       than `share` of the prompt.
    2. `over-threshold`: otherwise the prefill worker with the least queued work (of equals a random one); the estimates
       of all prefill workers are recorded.

    Without a prefill worker that can take the prompt: local, `no-prefill-worker`. The defaults are Dynamo's (1.6). A
    `share` above 1 leaves only the tokens to decide, which is llm-d's rule.

    Limits: load and targets do not count, so short rounds pile up on a decode worker that is already late. A prompt
    without history is always remote while `share` is at most 1.

    Example: `--routing threshold`, or `threshold(tokens=512)`
    """

    tokens: int = Field(2048, ge=0, description="Rounds with at least this many tokens to prefill are routed remotely.")
    share: float = Field(
        0.7, ge=0, description="Rounds with at least this part of their prompt to prefill are routed remotely."
    )

    def route(self, situation: RoutingSituation) -> RouteDecision:
        task, decode = situation.task, situation.decode
        workers = able(task, situation.prefill)
        if not workers:
            return local(decode, NO_PREFILL_WORKER)
        if task.incr_tokens < self.tokens and task.incr_tokens < self.share * task.context_tokens:
            return local(decode, "under-threshold")
        return least_queued(situation, workers, "over-threshold")
