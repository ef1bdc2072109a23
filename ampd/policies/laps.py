"""LAPS (arXiv 2601.11589): length-aware prefill. Short and long prefills do not wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from pydantic import Field

from ampd.perf.model import joined_tokens
from ampd.policies.base import OrderingSituation, Pick, PoolsSituation, RoleChange, RoutingSituation, Run, Wait
from ampd.policies.estimates import NO_PREFILL_WORKER, able, index_of_least, least_queued, local, queued_s
from ampd.policies.registry import Policy, register
from ampd.types import PrefillTask, Role, RouteDecision, WorkerView

SHORT, LONG = LANES = ("short", "long")
"""The lanes of prefill workers: for rounds with few new tokens, and for the others. A worker's label names its lane."""

_LENGTHS = (8, 256)
_BATCHES = (1, 64)
"""Least and greatest bucket of a captured graph, in tokens of the longest member and in members."""
_WORTH_S = 0.001
"""No timer is exact enough for a shorter wait."""
_BUSY = 0.1
"""Pressure that is taken off a worker that has work."""
_TAU = 0.5
"""Least relative difference in pressure for which a worker moves."""


@register("ordering", "laps")
class LapsOrdering(Policy):
    """Keep short and long prefills apart: they take turns, and short ones run as a batch in one pass.

    After LAPS (arXiv 2601.11589), the temporal form: one instance alternates between the classes.

    Reads: history, increment, arrival, TTFT target and postponements of every task in the queue; the performance
    model's prefill time of a batch.

    Rule: a task of at most `boundary_tokens` new tokens is short. While both classes wait they take turns. A long
    task runs alone. The shorts run in order of arrival, up to `depth` in one pass. A batch that is not full waits
    for more only while no long task waits, and until the earliest of
    - `max_wait_s` after its first task came;
    - the slack of its most urgent task: its deadline - the time that the batch takes - `margin_s`;
    - the time after which no further short prefill is expected before the deadline, by the arrival rate of the
      queue.
    The batch takes the prefill time of the smallest captured bucket that it fits into (powers of two: the longest
    member 8 to 256 tokens, 1 to 64 members).

    Limits: the paper adapts wait and depth after each dispatch; here both follow from the arrival rate at each
    pick. The boundary is a constant. Chunks of long tasks, padding and graphs belong to the engine.

    Example: `--ordering laps`, `--ordering "laps(boundary_tokens=512, max_wait_s=0.01)"`
    """

    boundary_tokens: int = Field(256, ge=1, description="The longest increment that counts as short.")
    depth: int = Field(_BATCHES[1], ge=1, le=1024, description="The most shorts in one pass.")
    max_wait_s: float = Field(0.02, ge=0, le=1, description="The longest wait of a short for others, in seconds.")
    margin_s: float = Field(
        0.005, ge=0, description="Part of the slack of the most urgent that a wait leaves, in seconds."
    )

    def pick(self, situation: OrderingSituation) -> Pick:
        queue = situation.queue
        shorts: list[int] = []
        first_long = -1
        for position, task in enumerate(queue):
            if task.incr_tokens <= self.boundary_tokens:
                shorts.append(position)
            elif first_long < 0:
                first_long = position
        if not shorts:
            return Run(first_long)
        head, *others = shorts[: self.depth]
        if first_long < 0:
            wait_s = self._wait_s(situation, [queue[position] for position in (head, *others)])
            return Wait(wait_s) if wait_s else Run(head, (), tuple(others))
        if _is_before(queue, first_long, head):
            return Run(first_long, (head,))
        return Run(head, (first_long,), tuple(others))

    def _wait_s(self, situation: OrderingSituation, shorts: Sequence[PrefillTask]) -> float:
        """How long short prefills should wait for more of them, while no long one waits; 0: not at all."""
        now_s, count = situation.now_s, len(shorts)
        first_s = min(task.arrival_s for task in shorts)
        if count >= self.depth or now_s - first_s >= self.max_wait_s:
            return 0.0
        due_s = min(task.arrival_s + task.slo.ttft_s for task in shorts)
        latest_s = due_s - batch_s(situation, shorts) - self.margin_s
        end_s = min(first_s + self.max_wait_s, latest_s)
        # After t seconds with `count` arrivals, the (end - t) seconds left bring count * (end - t) / t: less than one
        # from here on.
        hopeful_s = first_s + (end_s - first_s) * count / (count + 1)
        wait_s = hopeful_s - now_s
        return wait_s if wait_s >= _WORTH_S else 0.0


def batch_s(situation: OrderingSituation, tasks: Sequence[PrefillTask]) -> float:
    """Prefill time of one pass over these tasks, padded to the captured bucket if there is one, in seconds."""
    hist_tokens, tokens = joined_tokens([(task.hist_tokens, task.incr_tokens) for task in tasks])
    length = _bucket(max(task.incr_tokens for task in tasks), *_LENGTHS)
    batch = _bucket(len(tasks), *_BATCHES)
    return situation.model.prefill_s(hist_tokens, length * batch or tokens, situation.parallelism)


def _bucket(size: int, least: int, greatest: int) -> int:
    """The smallest power of two that holds `size`, at least `least`; 0: `size` exceeds `greatest`."""
    if size > greatest:
        return 0
    return max(1 << (max(size, 1) - 1).bit_length(), least)


def _is_before(queue: Sequence[PrefillTask], first: int, other: int) -> bool:
    """Whether it is the turn of the class of the task at `first`."""
    return (-queue[first].postponements, first) < (-queue[other].postponements, other)


@register("routing", "laps")
class LapsRouting(Policy):
    """Prefill every round on a prefill worker of the lane for its length. Goes with `--pools laps`.

    Reads: label, queue, held prefix and longest context of every prefill worker; prefill and transfer times of the
    performance model.

    Rule: a round with at most `boundary_tokens` new tokens is short. Of the prefill workers of its lane the one
    with the least queued work takes it (of equals a random one); reason `short` or `long`. If none of the lane can
    take the prompt, all prefill workers are candidates: `no-lane`. Without a prefill worker that can take the
    prompt: local, `no-prefill-worker`.

    Limits: the boundary between memory-bound and compute-bound prefills depends on the hardware and on the history;
    here it is a number. Without the pools policy no worker has a lane, and this is `always-remote`.

    Example: `--routing laps`
    """

    boundary_tokens: int = Field(256, ge=1, description="Most new tokens of a short prefill.")

    def route(self, situation: RoutingSituation) -> RouteDecision:
        task, prefill = situation.task, situation.prefill
        reason = SHORT if task.incr_tokens <= self.boundary_tokens else LONG
        workers = able(task, [worker for worker in prefill if worker.label == reason])
        if not workers:
            reason, workers = "no-lane", able(task, prefill)
        if not workers:
            return local(situation.decode, NO_PREFILL_WORKER)
        return least_queued(situation, workers, reason)


@register("pools", "laps")
class LapsPools(Policy):
    """Divide the prefill workers into a lane for short and one for long prefills, and move one worker at a time to the
    lane under pressure. Goes with `--routing laps`.

    Reads: queue, windowed TTFT and label of every prefill worker; prefill times of the performance model; the TTFT
    target.

    Rule: prefill workers without a lane get the smaller one (`joined`). Then, at most once in `cooldown_s`: a
    worker's pressure is the modelled seconds of its waiting prefills, over the TTFT target, plus the share by which
    its windowed TTFT exceeds the target, less 0.1 if it has work. A lane's pressure is the 90th percentile over its
    workers. The worker with the least queued work of the other lane joins the lane whose pressure exceeds 1.5 times
    the other's (`pressure`). A worker stays in each lane; a lane that has lost its last one gets another first
    (`refill`).

    Limits: roles stay, so it does not fix a shortage of prefill or decode workers as a whole. Having work counts as
    full utilisation. Prefills that are longer than the TTFT target keep their lane under pressure.

    Example: `--pools laps`, with `--routing laps`
    """

    cooldown_s: float = Field(5.0, ge=0, description="Least time between two moves, in seconds.")

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        prefill = [worker for worker in situation.workers if worker.role is Role.PREFILL]
        if len(prefill) < len(LANES):
            return ()
        lanes = {lane: [worker for worker in prefill if worker.label == lane] for lane in LANES}
        joining = [worker for worker in prefill if worker.label not in LANES]
        if joining:
            return _joined(joining, {lane: len(members) for lane, members in lanes.items()})
        if situation.changed_within(self.cooldown_s):
            return ()
        for lane, other in ((SHORT, LONG), (LONG, SHORT)):
            if not lanes[lane]:
                return _moved(situation, lanes[other], lane, "refill")
        pressure = {lane: self._pressure(situation, members) for lane, members in lanes.items()}
        for lane, other in ((SHORT, LONG), (LONG, SHORT)):
            if pressure[lane] > (1.0 + _TAU) * pressure[other] and len(lanes[other]) > 1:
                return _moved(situation, lanes[other], lane, "pressure")
        return ()

    def _pressure(self, situation: PoolsSituation, members: Sequence[WorkerView]) -> float:
        ordered = sorted(self._psi(situation, worker) for worker in members)
        return max(ordered[ceil(0.9 * len(ordered)) - 1], 0.0)

    def _psi(self, situation: PoolsSituation, worker: WorkerView) -> float:
        ttft_slo_s = situation.slo.ttft_s
        # The first one computes already.
        waiting = replace(worker, queue=worker.queue[1:])
        backlog = queued_s(waiting, situation.model) / ttft_slo_s
        miss = max(worker.ttft.mean_s / ttft_slo_s - 1.0, 0.0) if worker.ttft.count else 0.0
        return backlog + miss - _BUSY * bool(worker.queue)


def _joined(joining: Sequence[WorkerView], sizes: dict[str, int]) -> Sequence[RoleChange]:
    changes = []
    for worker in joining:
        lane = min(LANES, key=lambda lane: sizes[lane])
        sizes[lane] += 1
        changes.append(RoleChange(worker.worker_id, worker.role, "joined", lane))
    return changes


def _moved(situation: PoolsSituation, members: Sequence[WorkerView], lane: str, reason: str) -> Sequence[RoleChange]:
    chosen = members[index_of_least([queued_s(worker, situation.model) for worker in members], situation.rng)]
    return (RoleChange(chosen.worker_id, chosen.role, reason, lane),)
