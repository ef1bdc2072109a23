"""Results of the rounds of the last seconds, in a form in which those of several coordinators can be added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ampd.telemetry import latencies
from ampd.telemetry.latencies import Latencies
from ampd.types import Count, Seconds, Text


@dataclass(frozen=True, slots=True)
class ServedWindow:
    """The rounds that ended within a window, with any outcome.

    Attributes:
        length_s: of the window.
        span_s: the part of the window during which a coordinator was running; rates divide by it.
        rounds: all that ended after they were placed at least once.
        abandoned: rounds that their client left before they could meet or miss a target.
        failed: rounds that ended with an error.
        met, met_ttft, met_itl: rounds that met both targets, the TTFT target, the ITL target.
        refused: rounds that were refused because of load, before they were placed; not among `rounds`.
        ttft_targets_s, itl_targets_s: sums of the rounds' targets; 0: a coordinator is too old to count them.
        unnamed: rounds that came without a session, whether they have ended or not.
        output_tokens: sum over the first choice of each round.
        sessions_bound: sessions that were bound to a decode worker.
        sessions_repinned: sessions that were moved to another worker because theirs was lost.
        routes: route and reason, separated by a space -> rounds.
        ttft_initial, ttft_incremental: TTFTs of rounds that bound their session, and of the others.
        itl: mean gap between tokens, one value per round.
    """

    length_s: Seconds = 0.0
    span_s: Seconds = 0.0
    rounds: Count = 0
    abandoned: Count = 0
    failed: Count = 0
    met: Count = 0
    met_ttft: Count = 0
    met_itl: Count = 0
    refused: Count = 0
    output_tokens: Count = 0
    sessions_bound: Count = 0
    sessions_repinned: Count = 0
    unnamed: Count = 0
    ttft_targets_s: Seconds = 0.0
    itl_targets_s: Seconds = 0.0
    routes: Mapping[Text, Count] = field(default_factory=dict)
    ttft_initial: Latencies = field(default_factory=Latencies)
    ttft_incremental: Latencies = field(default_factory=Latencies)
    itl: Latencies = field(default_factory=Latencies)

    @property
    def judged(self) -> int:
        """Rounds that met or missed their targets: the denominator of attainment."""
        return self.rounds - self.abandoned


_SUMS = (
    *("rounds", "abandoned", "failed", "met", "met_ttft", "met_itl", "refused", "output_tokens"),
    *("sessions_bound", "sessions_repinned", "unnamed", "ttft_targets_s", "itl_targets_s"),
)
LATENCIES = ("ttft_initial", "ttft_incremental", "itl")


def merged(windows: Iterable[ServedWindow]) -> ServedWindow:
    """The sum of the windows, with the longest length and span."""
    parts = tuple(windows)
    routes: Counter[str] = Counter()
    for part in parts:
        routes.update(part.routes)
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
    if any(part.rounds and not part.ttft_targets_s for part in parts):
        sums["ttft_targets_s"] = sums["itl_targets_s"] = 0.0
    sums |= {name: latencies.merged(getattr(part, name) for part in parts) for name in LATENCIES}
    return ServedWindow(
        length_s=max((part.length_s for part in parts), default=0.0),
        span_s=max((part.span_s for part in parts), default=0.0),
        routes=dict(routes),
        **sums,
    )
