"""Passes of an engine: how many tokens of which prefills the next one computes, and whether it is a decode step too.

The engine asks before each pass. The simulated engine, the modelled one and SGLang's scheduler all ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampd.perf.model import PerformanceModel
from ampd.policies.base import SlicingPolicy, SlicingSituation
from ampd.policies.estimates import mixing_pays
from ampd.types import Parallelism, PrefillTask, Role, RunningRound


@dataclass(frozen=True, slots=True)
class NextPass:
    """What the next pass computes. Without anything to prefill it is a step of the batch.

    Attributes:
        tokens: of prefills, without the rounds that were handed over.
        is_mixed: it is a step of the batch too.
    """

    tokens: int
    is_mixed: bool = False


class PassSizes:
    """Asks the slicing policy for the next pass. It keeps no state between two passes.

    Args:
        role: the role that the worker has now.
    """

    def __init__(
        self,
        policy: SlicingPolicy,
        model: PerformanceModel,
        parallelism: Parallelism,
        page_tokens: int,
        role: Callable[[], Role] = lambda: Role.DECODE,
    ) -> None:
        self._policy = policy
        self._model = model
        self._parallelism = parallelism
        self._page_tokens = page_tokens
        self._role = role

    def next(
        self,
        oldest: PrefillTask | None,
        left_tokens: int,
        running: Sequence[RunningRound],
        now_s: float,
        *,
        handed_over: Sequence[int] = (),
        has_paused: bool = False,
    ) -> NextPass:
        """The next pass, for an engine that has prefills or rounds that were handed over.

        Less than all is a number of full pages, because an engine cuts prefills between pages.

        Args:
            oldest: what is left of the oldest prefill that the engine has; None: it has no targets, or there is none.
            left_tokens: of all its prefills.
            running: the rounds that decode there.
            handed_over: missing tokens of each round that was prefilled elsewhere (`is_taken_over`). They go along.
            has_paused: the batch has paused for the pass before. Then it makes a step before it pauses again.
        """
        tokens = left_tokens if oldest is None else self._tokens(oldest, left_tokens, running, now_s)
        if not running:
            return NextPass(tokens)
        computed = tokens + sum(handed_over)
        hist_tokens = 0 if oldest is None else oldest.hist_tokens
        if computed and self._pays_mixed(hist_tokens, computed, running):
            return NextPass(tokens, is_mixed=True)
        return NextPass(0 if has_paused else tokens)

    def _tokens(self, oldest: PrefillTask, left_tokens: int, running: Sequence[RunningRound], now_s: float) -> int:
        situation = SlicingSituation(
            model=self._model,
            now_s=now_s,
            task=oldest.with_tokens(oldest.hist_tokens, left_tokens),
            running=running,
            parallelism=self._parallelism,
            role=self._role(),
        )
        tokens = self._policy.slice(situation)
        if tokens >= left_tokens:
            return left_tokens
        pages = max(tokens // self._page_tokens, 1 if tokens > 0 or not running else 0)
        return min(pages * self._page_tokens, left_tokens)

    def _pays_mixed(self, hist_tokens: int, tokens: int, running: Sequence[RunningRound]) -> bool:
        context_tokens = sum([round_.context_tokens for round_ in running])
        return mixing_pays(self._model, hist_tokens, tokens, len(running), context_tokens, self._parallelism)


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
