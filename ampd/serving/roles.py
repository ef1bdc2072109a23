"""Changes of the workers' roles: what a pools policy wants, and what of it is done."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ampd.perf.model import PerformanceModel
from ampd.policies.base import PoolsPolicy, PoolsSituation, RoleChange
from ampd.policies.estimates import index_of_least, queued_s
from ampd.types import Role, Slo, WorkerView

POOLS_INTERVAL_S = 0.5
"""Time between two questions to the pools policy, where no other is set."""


def prefill_at_start(workers: int) -> int:
    """How many of these workers start as prefill workers, where none is named as one.

    Half of them, and one less where the number is odd: each round is decoded, but not each needs a prefill worker.
    """
    return workers // 2


@dataclass(frozen=True, slots=True)
class DueChange:
    """A change to make. `before`: the worker as it is when its turn comes."""

    change: RoleChange
    before: WorkerView


@dataclass(frozen=True, slots=True)
class DueChanges:
    """The answer to one question to the policy.

    Attributes:
        changes: to be made in this order.
        kept: changes that are not made, because the worker is the last that owns sessions.
    """

    changes: Sequence[DueChange]
    kept: Sequence[DueChange]


NO_OWNER = "no-owner"
"""Reason of a change: the last worker that owned sessions is lost."""


class RoleReview:
    """A pools policy, and the questions to it."""

    def __init__(
        self,
        policy: PoolsPolicy,
        model: PerformanceModel,
        slo: Slo,
        rng: random.Random,
    ) -> None:
        self._policy = policy
        self._model = model
        self._slo = slo
        self._rng = rng

    def wanted(self, workers: Sequence[WorkerView], now_s: float, changed_s: float) -> Sequence[RoleChange]:
        """The policy's answer.

        Args:
            changed_s: time of the latest change of a role; minus infinity if there was none.

        Raises:
            UserError: the policy needs what the performance model lacks.
        """
        return self._policy.change(
            PoolsSituation(
                model=self._model,
                now_s=now_s,
                workers=workers,
                slo=self._slo,
                changed_s=changed_s,
                rng=self._rng,
            )
        )

    def first_owner(self, workers: Sequence[WorkerView]) -> Sequence[RoleChange]:
        """The prefill worker with the least queued work becomes a decode worker, if no worker owns sessions.

        It cannot wait for the policy, which may rest: without an owner every round fails.
        """
        prefill = [view for view in workers if view.role is Role.PREFILL]
        if not prefill or len(prefill) < len(workers):
            return ()
        chosen = prefill[index_of_least([queued_s(view, self._model) for view in prefill], self._rng)]
        return (RoleChange(chosen.worker_id, Role.DECODE, NO_OWNER),)


def due_changes(workers: Sequence[WorkerView], wanted: Sequence[RoleChange]) -> DueChanges:
    """The changes that are made of those that a policy wants.

    A change to the role and label that a worker already has is no change. An unknown worker is skipped. The last
    worker that owns sessions does not become a prefill worker, because no session could begin then.
    """
    current = {view.worker_id: view for view in workers}
    changes: list[DueChange] = []
    kept: list[DueChange] = []
    for change in wanted:
        before = current.get(change.worker_id)
        if before is None or (before.role, before.label) == (change.role, change.label):
            continue
        if _leaves_an_owner(current, change):
            changes.append(DueChange(change, before))
            current[change.worker_id] = replace(before, role=change.role, label=change.label)
        else:
            kept.append(DueChange(change, before))
    return DueChanges(changes, kept)


def _leaves_an_owner(workers: Mapping[str, WorkerView], change: RoleChange) -> bool:
    """Whether a worker that owns sessions is left after a change."""
    return change.role.owns_sessions or any(
        view.role.owns_sessions for view in workers.values() if view.worker_id != change.worker_id
    )
