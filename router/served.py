"""The result of a round, passed once at its end to the observers: metrics, log, the window for `ampd top`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ampd.telemetry.metrics import names
from ampd.types import Slo
from router.decision_record import DecisionRecord

log = logging.getLogger(__name__)


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
        was_left: the client ended it, which is also how the frontend ends a round at a stop string.
        lasted_s: from its arrival to its end.
        outcome: the value of `names.OUTCOMES` that this round counts as against its targets, as far as it came.
    """

    record: DecisionRecord
    slo: Slo
    is_initial: bool
    is_complete: bool
    ttft_s: float | None
    itl_s: float | None
    output_tokens: int
    was_left: bool
    lasted_s: float
    outcome: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outcome", self._outcome())

    @property
    def ttft_met(self) -> bool:
        """Whether the first token came in time."""
        return self.slo.ttft_met(self.ttft_s)

    @property
    def itl_met(self) -> bool:
        """Whether the mean gap was within its target; a single token has none."""
        return self.slo.itl_met(self.itl_s)

    def _outcome(self) -> str:
        if not self.is_complete and not self.was_left:
            return names.FAILED
        in_time = self.ttft_met or (self.ttft_s is None and self.lasted_s <= self.slo.ttft_s)
        if not in_time:
            return names.MISSED_TTFT if self.itl_met else names.MISSED_BOTH
        if self.ttft_s is None and not self.is_complete:
            return names.ABANDONED
        return names.MET if self.itl_met else names.MISSED_ITL


Observer = Callable[[ServedRound], None]
"""An observer must not wait, because it runs in the round's own task."""


def notify(observers: Iterable[Observer], served: ServedRound) -> None:
    """Call each observer with a round. An error of an observer is logged; the round and the others go on."""
    for observe in observers:
        try:
            observe(served)
        except Exception:
            log.exception("an observer of rounds failed")
