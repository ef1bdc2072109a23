"""How long the outputs of rounds in progress will be, judged by the outputs of recent rounds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


class OutputLengths:
    """The lengths of recent outputs, of which some still grow (Kaplan and Meier, 1958).

    The rounds that have ended would alone make outputs look shorter than they are, because long outputs are the last to
    end after a change of the load.

    Args:
        ended: output tokens of the rounds that have ended.
        growing: output tokens so far of the rounds in progress.
    """

    def __init__(self, ended: Sequence[int], growing: Sequence[int]) -> None:
        observed = sorted([(tokens, True) for tokens in ended] + [(tokens, False) for tokens in growing])
        self._longest = observed[-1][0] if observed else 0
        self._steps: list[tuple[int, float]] = []
        """(tokens, share of the outputs that are longer)."""
        at_risk, share = len(observed), 1.0
        for tokens, group in groupby(observed, key=lambda item: item[0]):
            outcomes = [is_ended for _, is_ended in group]
            share *= 1 - sum(outcomes) / at_risk
            at_risk -= len(outcomes)
            self._steps.append((tokens, share))

    def expected(self, tokens: int = 0) -> int:
        """The expected length of an output that has `tokens` already.

        Nothing is known about outputs longer than the longest one so far. An output of that length is expected to
        become twice as long.
        """
        if tokens >= self._longest:
            return max(2 * tokens, 1)
        alive, area, before, share = 0.0, 0.0, tokens, 1.0
        for end, after in self._steps:
            if end <= tokens:
                share = after
                continue
            alive = alive or share
            area += share * (end - before)
            before, share = end, after
        area += share * self._longest
        return max(tokens + round(area / alive), tokens + 1) if alive else max(2 * tokens, 1)
