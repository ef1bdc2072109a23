"""The published state of a coordinator, with the rounds of its last minute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ampd.types import Count, Seconds, Slo, Text


@dataclass(frozen=True, slots=True)
class ServedWindow:
    """The rounds that ended within a window, with any outcome, as counts that add up over coordinators.

    Attributes:
        span_s: the part of the window during which a coordinator was running; rates divide by it.
        counts: by words. Of rounds that were placed at least once: `outcome OUTCOME`, `route ROUTE REASON`,
            `output_tokens` (of the first choice), `ttft_targets_us`, `itl_targets_us`. Of rounds that were refused
            because of load: `refused`; that came without a session: `unnamed`. Of sessions: `bound` to a decode worker,
            `moved` because theirs was lost. Latencies: `ttft_initial`, `ttft_incremental` and `itl` with a bucket, or
            with `us`, their sum in microseconds. An ITL is the mean of a round.
    """

    span_s: Seconds = 0.0
    counts: Mapping[Text, Count] = field(default_factory=dict)


def merged(windows: Iterable[ServedWindow]) -> ServedWindow:
    """The sum of the windows, with the longest span."""
    span_s, counts = 0.0, Counter[str]()
    for window in windows:
        span_s = max(span_s, window.span_s)
        counts.update(window.counts)
    return ServedWindow(span_s, counts)


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
    context_tokens: Count = 0
    window: ServedWindow = field(default_factory=ServedWindow)
