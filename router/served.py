"""What became of a round, told once at its end to whoever counts rounds: metrics, the window for `ampd top`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampd.types import Slo
from router.record import DecisionRecord


@dataclass(frozen=True, slots=True)
class ServedRound:
    """A round that was placed at least once.

    Attributes:
        record: its decision record, as the client may ask for it.
        is_initial: its session was bound by this round.
        is_complete: it ended by itself: neither the client left nor a worker was lost for good.
        ttft_s: from its arrival to its first token; None: it had none.
        itl_s: mean gap of its first choice; None: it had fewer than two tokens.
        output_tokens: of its first choice.
    """

    record: DecisionRecord
    slo: Slo
    is_initial: bool
    is_complete: bool
    ttft_s: float | None
    itl_s: float | None
    output_tokens: int

    @property
    def ttft_met(self) -> bool:
        """Whether the first token came in time."""
        return self.ttft_s is not None and self.ttft_s <= self.slo.ttft_s

    @property
    def itl_met(self) -> bool:
        """Whether the mean gap was within its target; a single token has none."""
        return self.itl_s is None or self.itl_s <= self.slo.itl_s


Observer = Callable[[ServedRound], None]
"""Must neither wait nor raise: it runs in the round's own task."""
