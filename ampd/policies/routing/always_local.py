"""Every prefill on the session's decode worker: co-located serving."""

from __future__ import annotations

from ampd.policies.base import RoutingSituation
from ampd.policies.estimates import NO_PREFILL_WORKER, able, local
from ampd.policies.registry import Policy, register
from ampd.types import RouteDecision


@register("routing", "always-local")
class AlwaysLocal(Policy):
    """Prefill every round on the session's decode worker (co-located serving).

    Reads: only whether there is a prefill worker that could take the prompt, to name the reason: `always-local`, or
    `no-prefill-worker` as with every other policy.

    Limits: every prefill pauses the decodes of that worker; prefill workers stay idle.

    Example: `--routing always-local`
    """

    def route(self, situation: RoutingSituation) -> RouteDecision:
        is_able = able(situation.task, situation.prefill)
        return local(situation.decode, "always-local" if is_able else NO_PREFILL_WORKER)
