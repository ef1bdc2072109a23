"""Sessions that move to another owner before a round: which moves pay, and how many were made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampd.serving.moves import Move
from ampd.serving.placement import PlacementPolicies
from ampd.state.view import ClusterView
from ampd.types import PrefillTask, RouteDecision, WorkerView

if TYPE_CHECKING:
    from router.placement import Ask


@dataclass(frozen=True, slots=True)
class MovingSession:
    """What a round knows of the moves of its session.

    Attributes:
        may_move: the session may move with this round.
        moved_s: when it moved last, as far as this replica knows; minus infinity: never.
        history: the owner before, if the session moved with this round and the round has to be placed again.
    """

    may_move: bool = False
    moved_s: float = float("-inf")
    history: str | None = None


STAYS = MovingSession()


class SessionMoves:
    """Asks for each round whether its session should move.

    Args:
        is_on: False: sessions move only if their owner is lost.

    Attributes:
        made: moves that this replica made, by reason.
    """

    def __init__(self, view: ClusterView, policies: PlacementPolicies, *, is_on: bool) -> None:
        self._view = view
        self._policies = policies
        self._is_on = is_on
        self.made = Counter[str]()

    def due(self, ask: Ask, decode: WorkerView, task: PrefillTask, stay: RouteDecision, now_s: float) -> Move | None:
        """The move that pays; None: the session stays at `decode`."""
        if not self._is_on or not ask.moving.may_move:
            return None
        owners, prefill = self._view.decode(), self._view.prefill()
        return self._policies.move(
            task,
            decode,
            stay,
            owners,
            prefill,
            now_s,
            context_tokens=ask.prompt_tokens + 1,
            moved_s=ask.moving.moved_s,
            local_only=ask.local_only,
            shared_tokens=ask.shared_tokens([*owners, *prefill]),
        )
