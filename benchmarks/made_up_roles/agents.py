"""Agents that are made up: lengths from log-normal distributions, pauses from exponential ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from workloads.trace import Round, Session

_MINUTE_S = 60.0


@dataclass(frozen=True)
class Kind:
    """A kind of agent. `first_tokens`, `more_tokens` and `output_tokens` are (median, sigma of the logarithm).

    Attributes:
        rounds: the mean number, at least 1, with a geometric distribution.
        first_tokens: prompt of the first round.
        more_tokens: new tokens of each later round.
        tool_s: mean pause between two rounds.
    """

    name: str
    rounds: float
    first_tokens: tuple[float, float]
    more_tokens: tuple[float, float]
    output_tokens: tuple[float, float]
    tool_s: float

    def session(self, number: int, arrival_s: float, rng: random.Random) -> Session:
        """An agent of this kind."""
        rounds = [self._round(rng, is_first=True)]
        while rng.random() > 1 / self.rounds:
            rounds.append(self._round(rng, is_first=False))
        return Session(session_id=f"{self.name}-{number}", arrival_s=arrival_s, rounds=tuple(rounds))

    def _round(self, rng: random.Random, *, is_first: bool) -> Round:
        return Round(
            incr_tokens=_length(self.first_tokens if is_first else self.more_tokens, rng),
            output_tokens=_length(self.output_tokens, rng),
            tool_s=0.0 if is_first else rng.expovariate(1 / self.tool_s),
        )


def _length(of: tuple[float, float], rng: random.Random) -> int:
    return max(round(rng.lognormvariate(log(of[0]), of[1])), 1)


def arriving(kinds: Sequence[Kind], rate: float, seconds: float, seed: int) -> list[Session]:
    """Poisson arrivals of all kinds by turns, a minute each."""
    rng = random.Random(f"{seed}/{kinds[0].name}")
    sessions: list[Session] = []
    now_s = rng.expovariate(rate)
    while now_s < seconds:
        kind = kinds[int(now_s / _MINUTE_S) % len(kinds)]
        sessions.append(kind.session(len(sessions), now_s, rng))
        now_s += rng.expovariate(rate)
    return sessions


WRITERS = Kind("writers", 3, (300, 0.7), (150, 0.7), (700, 0.6), 4.0)
TOOLS = Kind("tools", 10, (2500, 0.5), (350, 1.0), (50, 0.7), 0.8)
CODERS = Kind("coders", 14, (9000, 0.6), (1200, 1.1), (220, 0.9), 4.0)
READERS = Kind("readers", 3, (5000, 0.5), (2500, 0.8), (50, 0.6), 2.0)
TALKERS = Kind("talkers", 2, (400, 0.6), (200, 0.6), (500, 0.5), 2.0)
