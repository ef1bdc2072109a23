"""Synthetic agent sessions with the means of the AMPD paper's workload table (arXiv 2602.14516)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import exp, log

from workloads.retime import poisson_arrivals
from workloads.trace import Round, Session


class Lengths(StrEnum):
    """Whether the table's token counts are totals of a session or means of a round. The paper leaves it open."""

    PER_SESSION = "per-session"
    PER_ROUND = "per-round"


@dataclass(frozen=True, slots=True)
class Workload:
    """The known figures of a workload, and our assumptions where the paper has none.

    Attributes:
        mean_rounds, mean_prefill_tokens, mean_output_tokens: the paper's table.
        draw_rounds: assumption: how the number of rounds is spread around its mean.
        initial_share: assumption: the first round's expected share of a session's prefill tokens.
        spread: assumption: sigma of the log-normal factor on a session's tokens.
        mean_tool_s: assumption: mean tool time, log-normal with sigma 1.
    """

    mean_rounds: float
    mean_prefill_tokens: float
    mean_output_tokens: float
    draw_rounds: Callable[[random.Random], int]
    initial_share: float
    spread: float
    mean_tool_s: float


def _poisson(mean: float, rng: random.Random) -> int:
    count, clock = 0, rng.expovariate(1.0)
    while clock < mean:
        count += 1
        clock += rng.expovariate(1.0)
    return count


def _two_and_poisson(mean_rounds: float) -> Callable[[random.Random], int]:
    return lambda rng: 2 + _poisson(mean_rounds - 2, rng)


def _two_and_negative_binomial(mean_rounds: float, shape: float) -> Callable[[random.Random], int]:
    """A Poisson whose mean is itself gamma distributed: a long tail of long sessions."""
    return lambda rng: 2 + _poisson(rng.gammavariate(shape, (mean_rounds - 2) / shape), rng)


WORKLOADS: dict[str, Workload] = {
    "toolbench": Workload(3.96, 703.79, 50.39, _two_and_poisson(3.96), 0.6, 0.5, 1.0),
    "gaia": Workload(11.32, 6161.02, 528.76, _two_and_negative_binomial(11.32, 3.0), 0.3, 0.8, 3.0),
    "hotpotqa": Workload(3.0, 1569.8, 80.03, lambda _: 3, 1 / 3, 0.3, 0.3),
    "dureader": Workload(3.0, 3081.23, 150.10, lambda _: 3, 1 / 3, 0.4, 0.3),
}

_TOOL_SIGMA = 1.0
_SPLIT_SHAPE = 2.0
"""Gamma shape of the weights by which a session's tokens are split over its rounds (smaller is more uneven)."""


def generate(
    workload: str, sessions: int, rate: float, seed: int, lengths: Lengths, mean_tool_s: float | None = None
) -> Iterator[Session]:
    """`sessions` sessions arriving as a Poisson process of `rate` per second; the same seed gives the same trace.

    A session of n rounds expects n times the per-round mean (per session: the table's total over the mean rounds), so
    that long sessions carry more tokens and the mean over sessions is the table's. `mean_tool_s` replaces the
    workload's assumed mean tool time.
    """
    spec = WORKLOADS[workload]
    arrivals = poisson_arrivals(sessions, rate, random.Random(f"{seed}/arrivals"))
    rng = random.Random(f"{seed}/{workload}")
    tool_s = spec.mean_tool_s if mean_tool_s is None else mean_tool_s
    for number, arrival_s in enumerate(arrivals):
        rounds = _rounds(spec, lengths, tool_s, rng)
        yield Session(session_id=f"{workload}-{seed}-{number:05d}", arrival_s=round(arrival_s, 6), rounds=rounds)


def _rounds(spec: Workload, lengths: Lengths, mean_tool_s: float, rng: random.Random) -> tuple[Round, ...]:
    count = spec.draw_rounds(rng)
    scale = count if lengths is Lengths.PER_ROUND else count / spec.mean_rounds
    prefill = _total(spec.mean_prefill_tokens * scale, spec.spread, count, rng)
    output = _total(spec.mean_output_tokens * scale, spec.spread, count, rng)
    rest = (1 - spec.initial_share) / (count - 1)
    increments = _split(prefill, [spec.initial_share] + [rest] * (count - 1), rng)
    outputs = _split(output, [1.0] * count, rng)
    return tuple(
        Round(
            incr_tokens=increments[index],
            output_tokens=outputs[index],
            tool_s=round(_log_normal(mean_tool_s, _TOOL_SIGMA, rng), 3) if index and mean_tool_s > 0 else 0.0,
        )
        for index in range(count)
    )


def _log_normal(mean: float, sigma: float, rng: random.Random) -> float:
    return exp(rng.normalvariate(log(mean) - sigma * sigma / 2, sigma))


def _total(mean: float, sigma: float, at_least: int, rng: random.Random) -> int:
    # Rounded up or down by chance, so that rounding does not move the mean.
    return max(at_least, int(_log_normal(mean, sigma, rng) + rng.random()))


def _split(total: int, shares: list[float], rng: random.Random) -> list[int]:
    """Split `total` into parts of at least 1 that expect `shares` of it."""
    free = total - len(shares)
    weights = [rng.gammavariate(_SPLIT_SHAPE * share * len(shares) / sum(shares), 1.0) for share in shares]
    whole = sum(weights)
    edges = [0]
    reached = 0.0
    for weight in weights:
        reached += weight
        edges.append(round(free * reached / whole))
    return [1 + right - left for left, right in pairwise(edges)]
