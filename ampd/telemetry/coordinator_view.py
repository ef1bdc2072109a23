"""The published state of a coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampd.telemetry.served_window import ServedWindow
from ampd.types import Count, Slo, Text


@dataclass(frozen=True, slots=True)
class CoordinatorView:
    """The state that a coordinator publishes for viewers such as `ampd top`. No policy reads it.

    Other coordinators read only its `context_tokens`, before they register the model anew (`router.other_cards`).

    Attributes:
        coordinator_id: the Dynamo instance id, in hexadecimal.
        slo: the targets of rounds without their own.
        routing, binding, pools: the policies by which it decides.
        rounds_in_progress: rounds that it serves now.
        is_leading: it assigns the workers' roles (with static pools no coordinator does).
        is_state_heard: it is connected to the shared state; otherwise it decides by its last view.
        state_losses: times that it lost the shared state since it started.
        considered: the roles that its pools policy considered last, in words; "": none.
        context_tokens: with which it has registered the model at the frontends; 0: it has not, or without a limit.
        window: the rounds that ended there in the last minute.
    """

    coordinator_id: Text
    slo: Slo
    routing: Text = ""
    binding: Text = ""
    pools: Text = ""
    rounds_in_progress: Count = 0
    is_leading: bool = False
    is_state_heard: bool = True
    state_losses: Count = 0
    considered: Text = ""
    context_tokens: Count = 0
    window: ServedWindow = field(default_factory=ServedWindow)
