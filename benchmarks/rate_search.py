"""Goodput: the highest session rate at which a share of the rounds, or of the sessions, still meets its targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt
from typing import Generic, TypeVar

Shares = TypeVar("Shares")

_LONGEST_STEP = 1.6
"""Upwards: a rate far too high is the slowest one to try."""


@dataclass
class RateSearch(Generic[Shares]):
    """Looks for the highest rate by doubling, halving and bisection; what was tried is shared by all criteria.

    Args:
        attained: what is attained at a rate, an attribute for each criterion; asked once a rate.
        precision: the rate that is found and the next one that fails are at most this factor apart.
        lowest_rate: below this the search gives up and says 0.
        highest_rate: from here on it stops and says what it has.
        first_step: factor of the first step away from the start; smaller where the start is nearly right.
    """

    attained: Callable[[float], Shares]
    precision: float = 1.05
    lowest_rate: float = 0.01
    highest_rate: float = 10_000.0
    first_step: float = 1.25
    tried: dict[float, Shares] = field(default_factory=dict)

    def highest(self, target: float, criterion: str, start_rate: float) -> float:
        """Sessions per second; 0: none, however low. `criterion`: an attribute of what is attained, as `rounds`."""
        low, high = self._bracket(target, criterion, start_rate)
        while low and high / low > self.precision:
            middle = sqrt(low * high)
            if self._holds(middle, target, criterion):
                low = middle
            else:
                high = middle
        return low

    def _bracket(self, target: float, criterion: str, start_rate: float) -> tuple[float, float]:
        """A rate that holds (0: none) and a higher one that fails; begins with what is known already."""
        holding = [rate for rate in self.tried if self._holds(rate, target, criterion)]
        failing = [rate for rate in self.tried if not self._holds(rate, target, criterion)]
        # Attainment is noisy: the lowest failure counts, and what holds above it does not.
        high = min(failing, default=0.0)
        low = max((rate for rate in holding if not high or rate < high), default=0.0)
        if not low and not high:
            low, high = (start_rate, 0.0) if self._holds(start_rate, target, criterion) else (0.0, start_rate)
        step = self.first_step
        while not high:
            if low >= self.highest_rate:
                return low, low
            rate, step = low * step, min(step * step, _LONGEST_STEP)
            low, high = (rate, 0.0) if self._holds(rate, target, criterion) else (low, rate)
        step = self.first_step
        while not low and high > self.lowest_rate:
            rate, step = high / step, step * step
            low, high = (rate, high) if self._holds(rate, target, criterion) else (0.0, rate)
        return low, high

    def _holds(self, rate: float, target: float, criterion: str) -> bool:
        if rate not in self.tried:
            self.tried[rate] = self.attained(rate)
        return bool(getattr(self.tried[rate], criterion) >= target)
