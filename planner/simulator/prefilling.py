"""The prefills that an engine has admitted, and their passes."""

from __future__ import annotations

from collections.abc import Iterator

from ampd.serving.pass_sizes import divided
from ampd.types import PrefillTask
from planner.simulator.request import SimulatedRequest

Part = tuple[int, int]
"""(KV that is there before the pass, tokens that the pass computes) of one prefill."""


class Prefilling:
    """Admitted prefills, the oldest first, and the pass that computes some of them.

    Args:
        page_tokens: the engine cuts prefills between pages of this size.

    Attributes:
        in_pass: the prefills of the pass, with the tokens that it computes of each.
    """

    __slots__ = ("_page_tokens", "_requests", "in_pass")

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._requests: list[SimulatedRequest] = []
        self.in_pass: list[tuple[SimulatedRequest, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[SimulatedRequest]:
        return iter(self._requests)

    def add(self, request: SimulatedRequest) -> None:
        """Admit a prefill."""
        self._requests.append(request)

    @property
    def mixes(self) -> bool:
        """Whether the next pass is a step of the decode batch, because the slicing says so."""
        return any(request.mixes for request in self._requests)

    def begin(self, most_tokens: int = 0) -> list[Part]:
        """Begin a pass over the oldest prefills, and return its parts. `most_tokens`: of the pass; 0: any number."""
        room = most_tokens or sum([request.left_tokens for request in self._requests])
        self.in_pass = []
        for request in self._requests:
            tokens = min(request.left_tokens, room)
            self.in_pass.append((request, tokens))
            room -= tokens
            if not room:
                break
        return self._parts()

    def begin_beside(self, most_tokens: int) -> list[Part]:
        """Begin a pass that is a step of the batch too; no parts: there is nothing to compute.

        Args:
            most_tokens: of the pass. Rounds that were prefilled elsewhere come first, and do not count.
        """
        page_tokens, others = self._page_tokens, self._others
        lefts = [request.left_tokens for request in others]
        self.in_pass = [(each, each.left_tokens) for each in self._requests if each.is_taken_over(page_tokens)]
        self.in_pass += [(others[index], tokens) for index, tokens in divided(lefts, most_tokens, page_tokens)]
        return self._parts()

    def _parts(self) -> list[Part]:
        return [(request.prompt_tokens - request.left_tokens, tokens) for request, tokens in self.in_pass]

    @property
    def _others(self) -> list[SimulatedRequest]:
        """The prefills that were not done elsewhere, or whose KV was lost on the way."""
        return [request for request in self._requests if not request.is_taken_over(self._page_tokens)]

    @property
    def oldest(self) -> PrefillTask | None:
        """What is left of the oldest prefill that was not done elsewhere; None: there is none."""
        for request in self._others:
            if request.task is not None:
                return request.task.with_tokens(request.prompt_tokens - request.left_tokens, request.left_tokens)
        return None

    @property
    def left_tokens(self) -> int:
        """Of all prefills that were not done elsewhere."""
        return sum([request.left_tokens for request in self._others])

    def take_reload_s(self) -> float:
        """Time of the reloads of the pass. A prefill's KV is reloaded in its first pass."""
        seconds = 0.0
        for request, _ in self.in_pass:
            seconds += request.reload_s
            request.reload_s = 0.0
        return seconds

    def end(self) -> list[SimulatedRequest]:
        """Count the pass, and remove the prefills that are complete with it."""
        for request, tokens in self.in_pass:
            request.passed_tokens += tokens
        done = [request for request, _ in self.in_pass if not request.left_tokens]
        self._requests = [request for request in self._requests if request.left_tokens]
        self.in_pass = []
        return done
