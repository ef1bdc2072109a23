"""What a routing table is fitted on: a workload on a cluster, and the buckets that its rounds fall into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np
from ampd_rivals.ppd.table_file import RoutingTable

from ampd.errors import UserError
from ampd.perf.piecewise import PiecewiseModel
from ampd.types import Route, Slo
from planner.simulator.options import Cluster, SimulationOptions
from workloads.trace import Session, kept_tokens, retime

LOADS = (0.0, 0.25, 0.5, 1.0)
"""Where the ranges of load begin: queued prefill time over the TTFT target."""

_RANGES = 4


@dataclass(frozen=True, slots=True)
class FitCase:
    """What a table is to be good at.

    Attributes:
        rates: sessions per second, each of them simulated; None: the trace's own arrivals.
        limit: sessions of one simulation; None: the trace once.
        output_scales: ascending factors on the output lengths; each is fitted by itself and gets a range of expected
            output.
        options: of the simulator; their seed is the fit's.
        steps: most tables to try in one descent.
    """

    sessions: tuple[Session, ...]
    cluster: Cluster
    model: PiecewiseModel
    slo: Slo
    rates: tuple[float | None, ...]
    limit: int | None = None
    binding: str = "least-kv"
    ordering: str = "ampd"
    slicing: str = "whole"
    output_scales: tuple[float, ...] = (1.0,)
    options: SimulationOptions = field(default_factory=SimulationOptions)
    steps: int = 150

    @property
    def mean_output_tokens(self) -> float:
        """Over the rounds of the trace, as it is."""
        outputs = [item.output_tokens for session in self.sessions for item in session.rounds]
        return sum(outputs) / len(outputs)

    def workloads(self, scale: float, seed: int, rates: Sequence[float | None]) -> list[list[Session]]:
        """The sessions of every rate, with scaled outputs."""
        sessions = [scaled(session, scale) for session in self.sessions]
        return [retime(sessions, rate, seed, self.limit) for rate in rates]


def scaled(session: Session, scale: float) -> Session:
    """The session with its outputs longer or shorter; what it keeps of its context stays, as far as it is there."""
    if scale == 1:
        return session
    rounds = []
    context_tokens = 0
    for item in session.rounds:
        output_tokens = max(round(item.output_tokens * scale), 1)
        keep_tokens = None if item.keep_tokens is None else min(item.keep_tokens, context_tokens)
        rounds.append(item.model_copy(update={"output_tokens": output_tokens, "keep_tokens": keep_tokens}))
        context_tokens = kept_tokens(rounds[-1], context_tokens) + item.incr_tokens + output_tokens
    return session.model_copy(update={"rounds": tuple(rounds)})


def blank_table(case: FitCase) -> RoutingTable:
    """The buckets, all of them remote.

    Ranges of context and increment hold as many rounds of the trace each; initial prefills have a range of their own.

    Raises:
        UserError: output scales that fall into one range.
    """
    prompts = [pair for session in case.sessions for pair in session.prompts_tokens()]
    axes = {
        "context_tokens_from": _starts([context for context, _ in prompts if context], (0, 1)),
        "increment_tokens_from": _starts([increment for _, increment in prompts], (0,)),
        "output_tokens_from": _output_starts(case),
        "load_from": LOADS,
    }
    context, increment, output, load = axes.values()
    rows = [
        {
            "context_tokens_from": bucket[0],
            "increment_tokens_from": bucket[1],
            "output_tokens_from": bucket[2],
            "by_load": (Route.REMOTE,) * len(load),
        }
        for bucket in product(context, increment, output)
    ]
    mean_tokens = round(case.mean_output_tokens, 1)
    return RoutingTable.model_validate({"expected_output_tokens": mean_tokens, "rows": rows, **axes})


def _starts(values: Sequence[int], first: tuple[int, ...]) -> tuple[int, ...]:
    """Quantiles as the starts of ranges, in two digits."""
    if not values:
        return first
    quantiles = np.quantile(values, [number / _RANGES for number in range(1, _RANGES)])
    rounded = {int(float(f"{quantile:.2g}")) for quantile in quantiles}
    return (*first, *sorted(start for start in rounded if start > first[-1]))


def _output_starts(case: FitCase) -> tuple[int, ...]:
    """Between the means of the scaled outputs."""
    means = [case.mean_output_tokens * scale for scale in case.output_scales]
    starts = (0, *(round((low * high) ** 0.5) for low, high in pairwise(means)))
    ends = (*starts[1:], float("inf"))
    if not all(start <= mean < end for start, mean, end in zip(starts, means, ends, strict=True)):
        raise UserError(
            f"--output-scales: give factors that grow and are further apart for outputs of "
            f"{case.mean_output_tokens:.1f} tokens (given: {', '.join(f'{scale:g}' for scale in case.output_scales)})"
        )
    return starts
