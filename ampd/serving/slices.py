"""How a prefill is cut: what a worker computes next of it, or how long it leaves the worker to its decode batch.

A slice computes a growing prefix of the prompt. Between two slices the decode batch runs, and the ordering picks again
among all waiting prefills. The last part is the round's own call of the engine, which brings the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampd.perf.model import PerformanceModel
from ampd.policies.base import Compute, SlicingPolicy, SlicingSituation, Wait
from ampd.policies.passes import as_one
from ampd.serving.kv_tiers import reusable_tokens
from ampd.serving.picker import SHORTEST_WAIT_S
from ampd.types import Parallelism, PrefillTask, Role, RunningRound


@dataclass(frozen=True, slots=True)
class ComputeTo:
    """Compute the first `end_tokens` of the prompt without output, then give the slot back.

    `mixes`: as in `Compute`.
    """

    end_tokens: int
    mixes: bool = False


@dataclass(frozen=True, slots=True)
class Rest:
    """Compute all that is left. `mixes`: as in `Compute`."""

    mixes: bool = False


@dataclass(frozen=True, slots=True)
class LookUp:
    """Look up how much of the prompt is really held, correct the task in the queue, and ask again."""


SliceStep = ComputeTo | Wait | Rest | LookUp

_REST = Rest()
_LOOK_UP = LookUp()


class Slices:
    """Decides the next step of prefills on one worker. It keeps no state between two steps.

    Args:
        role: the role that the worker has now.
    """

    def __init__(
        self,
        policy: SlicingPolicy,
        model: PerformanceModel,
        parallelism: Parallelism,
        page_tokens: int,
        role: Callable[[], Role],
    ) -> None:
        self._policy = policy
        self._model = model
        self._parallelism = parallelism
        self._page_tokens = page_tokens
        self._role = role

    def next(
        self, tasks: Sequence[PrefillTask], running: Sequence[RunningRound], now_s: float, *, is_exact: bool
    ) -> SliceStep:
        """The next step of a pass that has a slot.

        A pass of several prefills is short and is not cut, but it may have to wait. With no running round there is
        nothing to wait for. A slice ends with a full page, because the engine's cache keeps full pages only. It adds at
        least one page to what is held.

        Args:
            tasks: what is left of each prefill of the pass.
            running: the rounds that decode on the worker.
            is_exact: the history of a single prefill is what the worker really holds, in full pages. Otherwise it is
                what the coordinator knew. Only a prefill that is not computed at once needs the exact number, because a
                live worker has to ask its engine for it.
        """
        step = self._step(tasks, running, now_s)
        return step if is_exact or len(tasks) > 1 or isinstance(step, Rest) else _LOOK_UP

    def _step(self, tasks: Sequence[PrefillTask], running: Sequence[RunningRound], now_s: float) -> SliceStep:
        task = tasks[0] if len(tasks) == 1 else as_one(tasks)
        situation = SlicingSituation(
            model=self._model,
            now_s=now_s,
            task=task,
            running=running,
            parallelism=self._parallelism,
            role=self._role(),
        )
        shares_passes = self._policy.shares_passes
        chosen = Compute(self._policy.turn(situation)) if shares_passes else self._policy.slice(situation)
        if isinstance(chosen, Wait):
            # A shorter wait could leave the time where it is, and the policy would be asked for ever.
            return Wait(max(chosen.wait_s, SHORTEST_WAIT_S)) if running else _REST
        if len(tasks) > 1 or chosen.tokens >= task.incr_tokens:
            return Rest(chosen.mixes)
        page = self._page_tokens
        end_tokens = max((task.hist_tokens + chosen.tokens) // page, task.hist_tokens // page + 1) * page
        is_rest = end_tokens >= task.context_tokens
        return Rest(chosen.mixes) if is_rest else ComputeTo(end_tokens, chosen.mixes)


def with_held(task: PrefillTask, held_tokens: int, page_tokens: int) -> PrefillTask:
    """The task with the history that is really held, in full pages; at least one token remains to be computed."""
    return left_after(task, reusable_tokens(task.context_tokens, held_tokens, page_tokens))


def left_before(task: PrefillTask, end_tokens: int) -> PrefillTask:
    """What is left of a prefill up to its first `end_tokens`."""
    return task.with_tokens(task.hist_tokens, end_tokens - task.hist_tokens)


def left_after(task: PrefillTask, end_tokens: int) -> PrefillTask:
    """What is left of a prefill whose first `end_tokens` are computed."""
    return task.with_tokens(end_tokens, task.context_tokens - end_tokens)
