"""Short and long prefill lanes after LAPS (arXiv 2601.11589): workers follow the pressure from lane to lane."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.base import RoleChange
from ampd.policies.estimates import one_of_least, queued_s
from ampd.policies.registry import Policy, register
from ampd.types import Role, Slo, WorkerView

SHORT, LONG = LANES = ("short", "long")
"""The lanes of prefill workers: for rounds with few new tokens, and for the others."""


@register("pools", "laps")
class LapsPools(Policy):
    """Divide the prefill workers into a lane for short and one for long prefills, and move one worker at a time to the
    lane under pressure. Goes with `--routing laps`.

    Reads: queue, windowed TTFT and lane of every prefill worker; prefill times of the performance model; the TTFT
    target.

    Rule: prefill workers without a lane get the smaller one, the short lane first (`joined`). Then, at most once in
    `cooldown_s`: a worker's pressure is `backlog_weight` x (modelled seconds of what waits there / TTFT target)
    + `miss_weight` x (share by which its windowed TTFT exceeds the target) - `busy_weight` x (1 if it has work). A
    lane's pressure is the 90th percentile over its workers, and 0 at least. The worker with the least queued work of
    the other lane joins the lane whose pressure exceeds 1 + `tau` times the other's (`pressure`). `n_min` workers stay
    in each lane; a lane that has lost workers is filled up first (`refill`). With fewer than two times `n_min` prefill
    workers there are no lanes.

    Limits: roles stay; a shortage of prefill or decode workers as a whole is not mended. A view has no measured
    utilisation, so that having work counts as full. Prefills that are longer than the TTFT target keep
    their lane under pressure, though no worker would help them. A worker finishes what it has in its queue, of either
    length.

    Example: `--pools laps`, with `--routing laps`
    """

    backlog_weight: float = Field(1.0, ge=0, description="Weight of the work that waits, in TTFT targets.")
    miss_weight: float = Field(1.0, ge=0, description="Weight of the share by which TTFT exceeds its target.")
    busy_weight: float = Field(0.1, ge=0, description="What is taken off where a worker has work.")
    tau: float = Field(0.5, ge=0, description="By which share the pressures must differ for a worker to move.")
    n_min: int = Field(1, ge=1, description="Workers that stay in each lane.")
    cooldown_s: float = Field(5.0, ge=0, description="Least time between two moves, in seconds.")

    def change(
        self,
        workers: Sequence[WorkerView],
        slo: Slo,
        model: PerformanceModel,
        now_s: float,
        changed_s: float,
        rng: random.Random,
    ) -> Sequence[RoleChange]:
        """Lanes for those that have none, else at most one move."""
        prefill = [worker for worker in workers if worker.role is Role.PREFILL]
        if len(prefill) < 2 * self.n_min:
            return ()
        lanes = {lane: [worker for worker in prefill if worker.lane == lane] for lane in LANES}
        joining = [worker for worker in prefill if worker.lane not in LANES]
        if joining:
            return _joined(joining, {lane: len(members) for lane, members in lanes.items()})
        if now_s - changed_s < self.cooldown_s:
            return ()
        for lane, other in ((SHORT, LONG), (LONG, SHORT)):
            if len(lanes[lane]) < self.n_min:
                return _moved(lanes[other], lane, "refill", model, rng)
        pressure = {lane: self._pressure(members, slo, model) for lane, members in lanes.items()}
        for lane, other in ((SHORT, LONG), (LONG, SHORT)):
            if pressure[lane] > (1.0 + self.tau) * pressure[other] and len(lanes[other]) > self.n_min:
                return _moved(lanes[other], lane, "pressure", model, rng)
        return ()

    def _pressure(self, members: Sequence[WorkerView], slo: Slo, model: PerformanceModel) -> float:
        ordered = sorted(self._psi(worker, slo, model) for worker in members)
        return max(ordered[ceil(0.9 * len(ordered)) - 1], 0.0)

    def _psi(self, worker: WorkerView, slo: Slo, model: PerformanceModel) -> float:
        # The first one computes already.
        waiting = replace(worker, queue=worker.queue[1:])
        backlog = queued_s(waiting, model) / slo.ttft_s
        miss = max(worker.ttft.mean_s / slo.ttft_s - 1.0, 0.0) if worker.ttft.count else 0.0
        return self.backlog_weight * backlog + self.miss_weight * miss - self.busy_weight * bool(worker.queue)


def _joined(joining: Sequence[WorkerView], sizes: dict[str, int]) -> Sequence[RoleChange]:
    changes = []
    for worker in joining:
        lane = min(LANES, key=lambda lane: sizes[lane])
        sizes[lane] += 1
        changes.append(RoleChange(worker.worker_id, worker.role, "joined", lane))
    return changes


def _moved(
    members: Sequence[WorkerView], lane: str, reason: str, model: PerformanceModel, rng: random.Random
) -> Sequence[RoleChange]:
    chosen = members[one_of_least([queued_s(worker, model) for worker in members], rng)]
    return (RoleChange(chosen.worker_id, chosen.role, reason, lane),)
