"""Sessions that move to another owner before a round: which moves pay, and how many were made."""

from __future__ import annotations

from collections import Counter

from ampd.serving.moves import Move
from ampd.serving.placement import PlacementPolicies
from ampd.state.view import ClusterView
from ampd.types import PrefillTask, RouteDecision, WorkerView
from router.unplaced_round import UnplacedRound


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

    def due(
        self, unplaced: UnplacedRound, decode: WorkerView, task: PrefillTask, stay: RouteDecision, now_s: float
    ) -> Move | None:
        """The move that pays; None: the session stays at `decode`."""
        if not self._is_on or not unplaced.moving.may_move:
            return None
        owners, prefill = self._view.decode(), self._view.prefill()
        return self._policies.move(
            task,
            decode,
            stay,
            owners,
            prefill,
            now_s,
            context_tokens=unplaced.prompt_tokens + 1,
            moved_s=unplaced.moving.moved_s,
            local_only=unplaced.local_only,
            shared_tokens=unplaced.shared_tokens([*owners, *prefill]),
        )
