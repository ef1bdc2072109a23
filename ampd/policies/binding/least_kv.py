"""The decode worker with the least KV memory in use, once the session is there."""

from __future__ import annotations

from ampd.policies.base import BindingSituation, any_of
from ampd.policies.estimates import fits, session_memory
from ampd.policies.registry import Policy, register


@register("binding", "least-kv")
class LeastKv(Policy):
    """Bind a session to the decode worker with the least KV memory in use, once the session is there.

    Reads: each decode worker's used and total KV memory (of its KV store, or of its device without one), its
    longest context, how many sessions it holds, and how much of the prompt it holds for other sessions.

    Order: workers whose free KV memory and context length take the whole prompt come first; among those the fewest
    KV tokens in use with the prompt in it; then the fewest sessions held. Of equal workers it takes a random one.

    Limits: it counts tokens and not shares. The memory that bound sessions will still need does not count, so
    sessions that are bound between two views of a worker can all go to the emptiest one.

    Example: `--binding least-kv`
    """

    def bind(self, situation: BindingSituation) -> str:
        task, decode = situation.task, situation.decode
        shared = situation.shared_tokens
        keys = []
        for worker in decode:
            tokens = shared.get(worker.worker_id, 0) if shared else 0
            keys.append((not fits(worker, task, tokens), session_memory(worker)[0] - tokens, len(worker.held_tokens)))
        best = min(keys)
        equals = [worker for place, worker in enumerate(decode) if keys[place] == best]
        return (equals[0] if len(equals) == 1 else any_of(equals, situation.rng)).worker_id
