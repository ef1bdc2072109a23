"""The sessions of a trace as a population: what trials draw from, and what a mean session is like.

A trial must not depend on where a session stands in the file. So the sessions are sorted by what they do, and drawn at
random, without replacement until all have been drawn. Each tenth of the sessions, from the lightest to the heaviest
ones, gives every tenth session of a trial. So a short trial has light and heavy sessions in the trace's proportion.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, zip_longest
from statistics import fmean

from ampd.types import Slo
from workloads.trace import Session

_STRATA = 10


@dataclass(frozen=True, slots=True)
class Life:
    """The times of a session.

    Attributes:
        rounds_s: of each round, if it takes its targets.
        tools_s: before each round; 0 before the first one.
    """

    session: Session
    rounds_s: tuple[float, ...]
    tools_s: tuple[float, ...]

    @classmethod
    def of(cls, session: Session, slo: Slo) -> Life:
        rounds_s = tuple(slo.ttft_s + slo.itl_s * (item.output_tokens - 1) for item in session.rounds)
        return cls(session, rounds_s, tuple(item.tool_s for item in session.rounds))

    def seconds(self, speed: float = 1.0) -> float:
        """From the arrival to the end, if each round takes `speed` times its targets."""
        return speed * sum(self.rounds_s) + sum(self.tools_s)

    def sent_s(self, speed: float) -> list[float]:
        """When each round is sent, from the arrival on."""
        steps = (speed * round_s + tool_s for round_s, tool_s in zip(self.rounds_s, self.tools_s[1:], strict=False))
        return [0.0, *accumulate(steps)]


@dataclass(frozen=True, slots=True)
class Population:
    """The sessions of a trace, whatever their order in it.

    Attributes:
        lives: sorted, the sessions whose rounds take least first.
        rounds: of the mean session.
        lifetime_s: of the mean session at its targets, tools included.
        round_s: of the mean round at its targets.
        start_s: the decode batches of an empty cluster are nearly full after this time, if the load begins at once.
    """

    lives: tuple[Life, ...]
    rounds: float
    lifetime_s: float
    round_s: float
    start_s: float

    @classmethod
    def of(cls, sessions: Sequence[Session], slo: Slo) -> Population:
        lives = sorted((Life.of(session, slo) for session in sessions), key=_weight)
        rounds_s = sorted(seconds for life in lives for seconds in life.rounds_s)
        return cls(
            tuple(lives),
            len(rounds_s) / len(lives),
            fmean(life.seconds() for life in lives),
            fmean(rounds_s),
            _nearly_full_s(rounds_s),
        )

    def draws(self, rng: random.Random) -> Iterator[Life]:
        """Sessions without end. Each comes once before any comes twice."""
        count = len(self.lives)
        bounds = [count * stratum // _STRATA for stratum in range(_STRATA + 1)]
        while True:
            strata = [rng.sample(self.lives[low:high], high - low) for low, high in pairwise(bounds)]
            for row in zip_longest(*strata):
                present = [life for life in row if life is not None]
                yield from rng.sample(present, len(present))


_FULL = 0.95


def _nearly_full_s(rounds_s: Sequence[float]) -> float:
    """The time in which rounds of these times (ascending) have built up most of their steady number."""
    wanted, before_s = _FULL * sum(rounds_s), 0.0
    for index, seconds in enumerate(rounds_s):
        # Rounds that are longer than this one are all still there after its time.
        longer = len(rounds_s) - index
        if before_s + longer * seconds >= wanted:
            return (wanted - before_s) / longer
        before_s += seconds
    return rounds_s[-1]


def _weight(life: Life) -> tuple[object, ...]:
    """Sorts sessions by what they do. Those that are equal in it are interchangeable."""
    session = life.session
    shared = session.shared_prefix
    rounds = [
        (item.incr_tokens, item.output_tokens, item.tool_s, -1 if item.keep_tokens is None else item.keep_tokens)
        for item in session.rounds
    ]
    return sum(life.rounds_s), rounds, ("", 0) if shared is None else (shared.id, shared.tokens)


class _Same:
    """A key that is equal only to one of the same sessions, because comparing thousands of them takes long."""

    def __init__(self, sessions: tuple[Session, ...]) -> None:
        self.sessions = sessions

    def __hash__(self) -> int:
        return id(self.sessions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.sessions is self.sessions


@lru_cache(maxsize=2)
def _population(sessions: _Same, slo: Slo) -> Population:
    return Population.of(sessions.sessions, slo)


def population_of(sessions: tuple[Session, ...], slo: Slo) -> Population:
    """The population of these sessions, made once for all trials of a plan."""
    return _population(_Same(sessions), slo)
