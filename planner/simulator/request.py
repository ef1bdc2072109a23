"""Requests as the engine of one replica sees them, and the prefills among them with their passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ampd.serving.pass_sizes import divided, is_taken_over
from ampd.types import PrefillTask

Part = tuple[int, int]
"""(KV that is there before the pass, tokens that the pass computes) of one prefill."""


class OnPass(Protocol):
    """What `SimulatedRequest.on_pass` is."""

    def __call__(self, left_tokens: int, *, is_last: bool) -> None: ...


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request to an engine: a prefill, a round, or a round whose prompt was prefilled elsewhere.

    Attributes:
        prompt_tokens: its whole context; `cached_tokens` of it need not be computed.
        output_tokens: tokens to generate here; 0: only the KV is wanted.
        on_first, on_done: called with the request and the time after its first token here, and after its last.
        read_tokens: KV behind the cached tokens that was read from a peer and is not on the device yet.
        token_s: time of the latest token (of a request that was prefilled elsewhere: its first token).
        first_token_s: time of the round's first token, here or elsewhere; below 0: there is none yet.
        is_handed_over: its first token came elsewhere.
        history_tokens: tokens of the prompt whose KV had existed; counted once per round and worker, else 0.
        reload_s: time to copy its KV from the worker's store; the worker sets it when the request is admitted.
        on_pass: called when a pass begins, with what is left of its prefill after it, and if it is the last, beside
            a batch; None: nothing is called.
        task: what was left of its prefill when it came; None: it has no targets.
        passed_tokens: of its missing tokens, those of passes that have ended.
        end_step: number of the decode step that generates its last token; the decode batch sets it.
    """

    session_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    on_first: Callable[[SimulatedRequest, float], None] | None
    on_done: Callable[[SimulatedRequest, float], None]
    read_tokens: int = 0
    token_s: float = -1.0
    first_token_s: float = -1.0
    is_handed_over: bool = False
    history_tokens: int = 0
    reload_s: float = 0.0
    on_pass: OnPass | None = None
    task: PrefillTask | None = None
    passed_tokens: int = 0
    end_step: int = 0

    def hand_over(self, first_token_s: float) -> None:
        """Its first token came elsewhere, at this time."""
        self.token_s = self.first_token_s = first_token_s
        self.is_handed_over = True

    def is_taken_over(self, page_tokens: int) -> bool:
        """Whether it was prefilled elsewhere and has its KV."""
        return is_taken_over(self.is_handed_over, self.missing_tokens, page_tokens)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def behind_tokens(self) -> int:
        """KV that is there when the prefill pass begins."""
        return self.prompt_tokens - self.missing_tokens

    @property
    def missing_tokens(self) -> int:
        """Tokens that a prefill pass has to compute; at least the last token of the prompt."""
        return max(self.prompt_tokens - self.cached_tokens - self.read_tokens, 1)

    @property
    def left_tokens(self) -> int:
        """The missing tokens that no pass has computed yet."""
        return self.missing_tokens - self.passed_tokens


class Prefilling:
    """Admitted prefills, the oldest first, and the pass that computes some of them.

    Args:
        page_tokens: the engine cuts prefills between pages of this size.

    Attributes:
        in_pass: the prefills of the pass, with the tokens that it computes of each.
    """

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
    def handed_over(self) -> list[int]:
        """What each round misses that was prefilled elsewhere."""
        return [each.left_tokens for each in self._requests if each.is_taken_over(self._page_tokens)]

    def begin(self, most_tokens: int) -> list[Part]:
        """Begin a pass, and return its parts; none: there is nothing to compute.

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
