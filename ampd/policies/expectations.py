"""What the routing `predictive` expects of the ordering `on-time` and the slicing `slack`, defined once for all three.

The routing predicts what the other two do. Its predictions are only right while all of them take the same values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import Field

from ampd.policies.moore_hodgson import Job
from ampd.policies.registry import ORDERING, ROUTING, Policy
from ampd.types import PrefillTask

ITL_SHARE = 0.92
"""Share of the ITL target that prefills may use up."""

ORDERED_PREFILLS = 128
"""Waiting prefills that the ordering looks at. Workers publish as many, and sums of the others, so that a view has at
most about 30 kB."""


# No part of the policy, because compiled code calls a method of a policy, and reads a field of one, as interpreted code
# does.
@dataclass(frozen=True, slots=True)
class Weighing:
    """How prefills are weighed by their TTFT targets. The fields are those of `Expectations`."""

    headroom: float
    missed_weight: float

    def left_s(self, task: PrefillTask, now_s: float) -> float:
        """Seconds until `headroom` of a prefill's TTFT target is over."""
        return self.headroom * task.slo.ttft_s - (now_s - task.arrival_s)

    def job(self, task: PrefillTask, position: int, time_s: float, now_s: float) -> Job:
        """A prefill that takes `time_s` seconds, as a job: a round whose session has missed a target weighs less."""
        return Job(self.left_s(task, now_s), time_s, self.missed_weight if task.session_missed else 1.0, position)

    def on_time(
        self, tasks: Iterable[PrefillTask], times_s: Iterable[float], stretch: float, now_s: float
    ) -> list[Job]:
        """The queued prefills that can still be on time, as jobs without positions.

        Args:
            times_s: seconds that each prefill takes alone.
            stretch: how many times longer than alone each prefill takes.
        """
        return [
            Job(due_s, time_s, self.missed_weight if task.session_missed else 1.0, 0)
            for task, alone_s in zip(tasks, times_s, strict=True)
            if (time_s := alone_s * stretch) <= (due_s := self.left_s(task, now_s))
        ]


class Expectations(Policy):
    """Base of the policies that weigh prefills by their TTFT targets."""

    headroom: float = Field(
        0.95, gt=0, le=1, description="Share of the TTFT target to plan with; the same in routing and ordering."
    )
    missed_weight: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Weight of a round whose session has missed a target before; the same in routing and ordering.",
    )

    def weighing(self) -> Weighing:
        return Weighing(self.headroom, self.missed_weight)


def disagreement(routing: str, ordering: str) -> str | None:
    """A warning if routing and ordering have different values for a shared parameter; None if they agree.

    Args:
        routing, ordering: as written on the command line.

    Raises:
        UserError: one of them is unknown, or its parameters are wrong.
    """
    predicts, orders = ROUTING.create_named(routing), ORDERING.create_named(ordering)
    if not isinstance(predicts, Expectations) or not isinstance(orders, Expectations):
        return None
    names = [name for name in Expectations.model_fields if getattr(predicts, name) != getattr(orders, name)]
    if not names:
        return None
    values = ", ".join(f"{name} {getattr(predicts, name):g} and {getattr(orders, name):g}" for name in names)
    return (
        f"warning: --routing {routing} predicts what --ordering {ordering} does, but they have {values}; "
        f"give both the same {' and '.join(names)}"
    )
