"""ConServe: the first round remote, the later ones local (arXiv 2606.01839)."""

from __future__ import annotations

from ampd.policies.base import RoutingSituation
from ampd.policies.estimates import NO_PREFILL_WORKER, able, least_queued, local
from ampd.policies.registry import Policy, register
from ampd.types import RouteDecision


@register("routing", "first-remote")
class FirstRemote(Policy):
    """Prefill a session's first round remotely, and every later one on the decode worker that has its KV.

    Reads: whether the round has history; queue, held prefix and longest context of every prefill worker; prefill times
    of the performance model, for the queues.

    Rule: `later-round` with history: local. `first-round` without: the prefill worker with the least queued work (of
    equals a random one); the estimates of all prefill workers are recorded. Without a prefill worker that can take the
    prompt: local, `no-prefill-worker`.

    Limits: load, targets and the length of an increment do not count. A session whose KV was evicted or whose context
    was rewritten from the start counts as new.

    Example: `--routing first-remote`
    """

    def route(self, situation: RoutingSituation) -> RouteDecision:
        workers = able(situation.task, situation.prefill)
        if not workers:
            return local(situation.decode, NO_PREFILL_WORKER)
        if situation.task.hist_tokens:
            return local(situation.decode, "later-round")
        return least_queued(situation, workers, "first-round")
