"""Which KV goes when a store needs memory, by T-LRU (arXiv 2510.15152).

The ends of idle sessions go before whole sessions do, as far as the next round of each still meets its target.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism

TARGET_SHARE = 0.5
"""The share of the TTFT target that the prefill of a next round may take. The rest is for the wait in queues."""

_SESSIONS_KEPT = 4096

UNUSED, SURPLUS, IDLE = "unused", "surplus", "idle"
"""Why KV was evicted: no session needs it; its session can compute it again in time; memory was short all the same."""


@dataclass(frozen=True, slots=True)
class Evictable:
    """What a store can drop. Each function drops at most the given number, and returns how many are free.

    The unit is the store's own: pages or tokens. A function drops only from its first candidate. It returns 0 if
    nothing of its kind can go. Within a kind the least recently used goes first. KV that a request, a writer or a
    reader needs is of no kind.

    Attributes:
        unused: KV of no session.
        surplus: the end of an idle session that its next round can compute again within its target (`NextRounds`).
        idle: the end of an idle session.
    """

    unused: Callable[[int], int]
    surplus: Callable[[int], int]
    idle: Callable[[int], int]

    def evict(self, wanted: int) -> tuple[str, int]:
        """Drop up to `wanted` of what goes first; returns (why, how much). Nothing: all that is left is needed."""
        for cause, drop in (
            (UNUSED, self.unused),
            (SURPLUS, self.surplus),
            (IDLE, self.idle),
            # Evictions of idle sessions can leave KV that only these sessions needed.
            (UNUSED, self.unused),
        ):
            if dropped := drop(wanted):
                return cause, dropped
        return UNUSED, 0


def surplus(
    context_tokens: int, next_increment_tokens: int, target_s: float, model: PerformanceModel, parallelism: Parallelism
) -> int:
    """The most tokens that can be dropped from the end of a context without harm to the next round.

    The next round computes them again together with its increment, and still meets its target.

    Args:
        context_tokens: length of the session's context now.
        next_increment_tokens: tokens that the next round is expected to add before its first output token.
        target_s: what the prefill may take. It is the TTFT target less the time that the round waits in queues.
        model: its prefill time must not fall when more of the same context has to be computed.

    Returns:
        Tokens from 0 to `context_tokens`. 0 if the round misses the target with its whole context in place too.
    """

    def prefill_s(dropped_tokens: int) -> float:
        kept_tokens = context_tokens - dropped_tokens
        return model.prefill_s(kept_tokens, dropped_tokens + next_increment_tokens, parallelism)

    return max(0, bisect_right(range(context_tokens + 1), target_s, key=prefill_s) - 1)


@dataclass(slots=True)
class _Session:
    target_s: float
    context_tokens: int = 0
    increments: int = 0
    increment_tokens: int = 0


class NextRounds:
    """What the next round of each session is expected to need, so that a store knows which KV may go first.

    The next increment is expected to be as long as the mean of those so far. The output of a round counts to the
    increment of the next one.

    Args:
        model: predicts the time of prefills on this worker.
    """

    def __init__(self, model: PerformanceModel, parallelism: Parallelism) -> None:
        self._model = model
        self._parallelism = parallelism
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def begun(
        self, session_id: str, prompt_tokens: int, target_s: float | None, most_output_tokens: int | None
    ) -> None:
        """A request of the session has begun. Nothing is learnt from one without a session or a target.

        Args:
            most_output_tokens: 0: the request is no round, but a slice of a prefill or an announcement; None: any.
        """
        if not session_id or target_s is None or most_output_tokens == 0:
            return
        session = self._sessions.setdefault(session_id, _Session(target_s))
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > _SESSIONS_KEPT:
            self._sessions.popitem(last=False)
        session.target_s = target_s
        if prompt_tokens > session.context_tokens:
            session.increments += 1
            session.increment_tokens += prompt_tokens - session.context_tokens
            session.context_tokens = prompt_tokens

    def surplus(self, context_tokens: int, session_id: str) -> int:
        """How many of the last tokens of an idle session's context may be missing when its next round starts."""
        session = self._sessions.get(session_id)
        if session is None or not session.increments:
            return 0
        increment_tokens = session.increment_tokens // session.increments
        target_s = TARGET_SHARE * session.target_s
        return surplus(context_tokens, increment_tokens, target_s, self._model, self._parallelism)
