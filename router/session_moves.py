"""Sessions that move to another owner before a round: which may, and how many did."""

from __future__ import annotations

from collections import Counter

from ampd.serving.placement import Moving
from ampd.state.view import ClusterView
from ampd.types import Moves
from router.unplaced_round import UnplacedRound


class SessionMoves:
    """Knows of each round whether its session may move.

    Args:
        moves: which sessions may move while their owner lives.

    Attributes:
        made: moves that this replica made, by reason.
    """

    def __init__(self, view: ClusterView, moves: Moves) -> None:
        self._view = view
        self._moves = moves
        self.made = Counter[str]()

    def moving(self, unplaced: UnplacedRound) -> Moving | None:
        """How the session of a round may move; None: it stays."""
        if self._moves == "never" or not unplaced.moving.may_move:
            return None
        return Moving(
            moves=self._moves,
            owners=self._view.decode,
            context_tokens=unplaced.prompt_tokens + 1,
            moved_s=unplaced.moving.moved_s,
        )
