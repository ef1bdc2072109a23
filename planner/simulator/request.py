"""A request as the engine of one replica sees it."""

from __future__ import annotations

from collections.abc import Callable

from ampd.serving.pass_sizes import is_taken_over
from ampd.types import PrefillTask


class SimulatedRequest:
    """One request to an engine: a prefill, a round, or a round whose prompt was prefilled elsewhere.

    Attributes:
        prompt_tokens: its whole context; `cached_tokens` of it need not be computed.
        output_tokens: tokens to generate here; 0: only the KV is wanted.
        token_s: time of the latest token (of a request that was prefilled elsewhere: its first token).
        first_token_s: time of the round's first token, here or elsewhere; below 0: there is none yet.
        read_tokens: KV behind the cached tokens that was read from a peer and is not on the device yet.
        on_first, on_done: called with the request and the time after its first token here, and after its last.
        on_last_pass: called when its last pass beside a step of the batch begins; None: nothing is called.
        history_tokens: tokens of the prompt whose KV had existed; counted once per round and worker, else 0.
        reload_s: time to copy its KV from the worker's store; the worker sets it when the request is admitted.
        mixes: as in `ampd.policies.base.Compute`.
        task: what was left of its prefill when it came; None: it has no targets.
        is_handed_over: its first token came elsewhere.
        passed_tokens: of its missing tokens, those of passes that have ended.
        end_step: number of the decode step that generates its last token; the decode batch sets it.
    """

    __slots__ = (
        "cached_tokens",
        "end_step",
        "first_token_s",
        "history_tokens",
        "is_handed_over",
        "mixes",
        "on_done",
        "on_first",
        "on_last_pass",
        "output_tokens",
        "passed_tokens",
        "prompt_tokens",
        "read_tokens",
        "reload_s",
        "session_id",
        "task",
        "token_s",
    )

    def __init__(
        self,
        session_id: str,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        on_first: Callable[[SimulatedRequest, float], None] | None,
        on_done: Callable[[SimulatedRequest, float], None],
        read_tokens: int = 0,
        token_s: float = -1.0,
    ) -> None:
        self.session_id = session_id
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.read_tokens = read_tokens
        self.output_tokens = output_tokens
        self.on_first = on_first
        self.on_done = on_done
        self.token_s = self.first_token_s = token_s
        self.is_handed_over = token_s >= 0.0
        self.history_tokens = 0
        self.reload_s = 0.0
        self.mixes = False
        self.on_last_pass: Callable[[], None] | None = None
        self.task: PrefillTask | None = None
        self.passed_tokens = 0
        self.end_step = 0

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
