"""Passes of an engine that shares them: how many tokens of which prefills the next one computes beside a decode step.

The engine asks before each pass. The simulated engine, the modelled one and SGLang's scheduler all ask here.
"""

from __future__ import annotations

from collections.abc import Sequence

from ampd.perf.model import PerformanceModel
from ampd.policies.base import SlicingPolicy, SlicingSituation, Wait
from ampd.types import Parallelism, PrefillTask, RunningRound


class PassSizes:
    """Asks the slicing policy for the size of the next pass. It keeps no state between two passes."""

    def __init__(
        self, policy: SlicingPolicy, model: PerformanceModel, parallelism: Parallelism, page_tokens: int
    ) -> None:
        self._policy = policy
        self._model = model
        self._parallelism = parallelism
        self._page_tokens = page_tokens

    def tokens(self, oldest: PrefillTask, left_tokens: int, running: Sequence[RunningRound], now_s: float) -> int:
        """Tokens that the next pass prefills; 0: it is a step of the batch alone.

        Less than all is a number of full pages, because an engine cuts prefills between pages.

        Args:
            oldest: what is left of the oldest prefill that the engine has.
            left_tokens: of all its prefills.
            running: the rounds that decode there.
        """
        if not running:
            return left_tokens
        task = oldest.with_tokens(oldest.hist_tokens, left_tokens)
        chosen = self._policy.slice(
            SlicingSituation(model=self._model, now_s=now_s, task=task, running=running, parallelism=self._parallelism)
        )
        if isinstance(chosen, Wait):
            return 0
        if chosen.tokens >= left_tokens:
            return left_tokens
        return max(chosen.tokens // self._page_tokens, 1) * self._page_tokens


def is_taken_over(is_handed_over: bool, missing_tokens: int, page_tokens: int) -> bool:
    """Whether a round was handed over with its KV: it lacks the last page and its first token at most.

    One that lacks more is a prefill like any other, because its KV was lost on the way.

    Args:
        is_handed_over: its first token came elsewhere, and is part of its prompt.
    """
    return is_handed_over and missing_tokens <= page_tokens + 1


def full_pages(tokens: Sequence[int], page_tokens: int) -> int:
    """Tokens in the pages that these parts of prefills take, each part its own."""
    return sum([-(-each // page_tokens) for each in tokens]) * page_tokens


def divided(left_tokens: Sequence[int], most_tokens: int, page_tokens: int) -> list[tuple[int, int]]:
    """The prefills of a pass in the order in which it takes them: (index, tokens).

    Prefills that are shorter than the oldest one come before it, the shortest first, as far as they fit whole beside a
    page of it (SGLang's schedule `shortest-prefill-first`). The others follow by age. As in SGLang each of them counts
    with all its pages. So only the last one may be cut, and it is cut between pages.

    Args:
        left_tokens: of each prefill, the oldest first.
        most_tokens: of the pass, as `PassSizes` says.
    """
    if most_tokens >= sum(left_tokens):
        most_tokens = full_pages(left_tokens, page_tokens)
    order = list(range(len(left_tokens)))
    if len(order) > 1:
        room = most_tokens - page_tokens
        before = []
        for index in sorted(order[1:], key=left_tokens.__getitem__):
            room -= full_pages([left_tokens[index]], page_tokens)
            if room < 0 or left_tokens[index] >= left_tokens[0]:
                break
            before.append(index)
        order = [*before, *(index for index in order if index not in before)]
    taken = []
    for index in order:
        if most_tokens <= 0:
            break
        tokens = min(left_tokens[index], most_tokens)
        taken.append((index, tokens))
        most_tokens -= full_pages([tokens], page_tokens)
    return taken
