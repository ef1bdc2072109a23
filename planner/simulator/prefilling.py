"""The prefills that an engine has admitted, and their passes."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from ampd.page_keys import PAGE_TOKENS
from planner.simulator.request import SimulatedRequest

Part = tuple[int, int]
"""(KV that is there before the pass, tokens that the pass computes) of one prefill."""

_LEAST_TOKENS = PAGE_TOKENS
"""What the oldest prefill gets of each pass, whatever comes before it."""


class Prefilling:
    """Admitted prefills, the oldest first, and the pass that computes some of them.

    Attributes:
        in_pass: the prefills of the pass, with the tokens that it computes of each.
    """

    __slots__ = ("_requests", "in_pass")

    def __init__(self) -> None:
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
    def decode_share(self) -> float | None:
        """How the decode batch makes a step during the next pass; None: it pauses."""
        shares = [request.decode_share for request in self._requests if request.decode_share is not None]
        return shares[0] if shares else None

    def begin(self, most_tokens: int = 0) -> list[Part]:
        """Begin a pass over the oldest prefills, and return its parts. `most_tokens`: of the pass; 0: any number."""
        return self._begin(self._requests, most_tokens or inf)

    def begin_shortest(self, most_tokens: int) -> list[Part]:
        """Begin a pass of an engine that is told how many tokens to prefill; no parts: there is nothing to compute.

        Rounds that were prefilled elsewhere come first, and do not count. Then come prefills that are shorter than the
        oldest one, as far as they fit whole beside a page of it (SGLang's schedule `shortest-prefill-first`).
        """
        handed_over = [request for request in self._requests if request.is_handed_over]
        others = [request for request in self._requests if not request.is_handed_over]
        if others:
            oldest = others[0]
            room = most_tokens - min(oldest.left_tokens, _LEAST_TOKENS)
            before = []
            for request in sorted(others[1:], key=lambda each: each.left_tokens):
                room -= request.left_tokens
                if room < 0 or request.left_tokens >= oldest.left_tokens:
                    break
                before.append(request)
            others = [*before, *(request for request in others if request not in before)]
        return self._begin([*handed_over, *others], most_tokens + sum(request.left_tokens for request in handed_over))

    def _begin(self, requests: list[SimulatedRequest], room: float) -> list[Part]:
        self.in_pass = []
        parts = []
        for request in requests:
            if room <= 0:
                break
            tokens = int(min(request.left_tokens, room))
            parts.append((request.prompt_tokens - request.left_tokens, tokens))
            self.in_pass.append((request, tokens))
            room -= tokens
        return parts

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
