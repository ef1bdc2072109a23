"""The measurements of one round on one worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ampd.serving.kv_tiers import Tiers, history_tokens
from ampd.types import PrefillTask
from ampd.wire import RoundReport
from workers.engines.base import EngineLoad, EngineOutput
from workers.kv.exchange import KvFetch


@dataclass(slots=True)
class RoundProgress:
    """How far a round has come here. Times are on the worker's clock.

    Attributes:
        rid: id of the engine's request.
        task: the prefill, as it waits in the queue.
        token_ids: of the prompt.
        page_keys: keys of its full pages; they are hashed once and passed to the engine and its KV exchange.
        kept_tokens: of it, in the context of its session before; 0 also if it is not known.
        handed_over_s: when the round's first token, sampled elsewhere, came with the request; None: it is sampled here.
        tiers: where the KV of the prompt was when the engine began with it; None: the engine has not said so yet.
        reload_s: how long the engine copied from the store; 0: it copied nothing.
        last_token_s: when the last token of each choice came out here.
        has_left_queue: its prefill was reported as done or given up.
    """

    rid: str
    task: PrefillTask
    token_ids: list[int]
    arrived_s: float
    page_keys: Sequence[bytes] = ()
    kept_tokens: int = 0
    started_s: float = 0.0
    handed_over_s: float | None = None
    prefill_s: float = 0.0
    tiers: Tiers | None = None
    reload_s: float = 0.0
    fetched: KvFetch = field(default_factory=KvFetch)
    last_token_s: dict[int, float] = field(default_factory=dict)
    has_left_queue: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def queued_s(self) -> float:
        """Wait in the queue, without the read of the history."""
        return max(0.0, self.started_s - self.arrived_s - self.fetched.seconds)

    def set_tiers(self, output: EngineOutput) -> None:
        """Read the engine's counts."""
        # What was read from the peer went into the store, and came to the device from there.
        peer_tokens = min(self.fetched.tokens, output.reloaded_tokens)
        self.tiers = Tiers(
            output.cached_tokens - output.reloaded_tokens,
            output.reloaded_tokens - peer_tokens,
            peer_tokens,
            self.prompt_tokens - output.cached_tokens,
        )
        self.reload_s = output.reload_s

    def hit_tokens(self, page_tokens: int) -> dict[str, int]:
        """The prompt by tier.

        A round whose first token came from elsewhere should find its whole prompt but the last page.
        """
        if self.tiers is None:
            return {}
        history = history_tokens(self.kept_tokens, self.task.hist_tokens, page_tokens)
        return self.tiers.hit_tokens(history if self.handed_over_s is None else self.prompt_tokens - 1, page_tokens)

    def begins_to_decode(self) -> bool:
        """Whether no token has come out here yet although the round's first token came from elsewhere."""
        return not self.last_token_s and self.handed_over_s is not None

    def gap_s(self, index: int, tokens: int, now_s: float) -> float | None:
        """Mean time per token since the choice's last output; None for the round's first token."""
        before_s = self.last_token_s.get(index, self.handed_over_s)
        self.last_token_s[index] = now_s
        return None if before_s is None else (now_s - before_s) / tokens

    def report(self, load: EngineLoad, held_tokens: int, hit_tokens: dict[str, int]) -> RoundReport:
        """The report for the coordinator, in the round's last chunk."""
        report = RoundReport(
            held_tokens=held_tokens,
            cached_tokens=self.tiers.reused_tokens if self.tiers else 0,
            hit_tokens=hit_tokens,
            queued_s=self.queued_s,
            prefill_s=self.prefill_s,
            kv_read_tokens=self.fetched.tokens,
            kv_read_bytes=self.fetched.bytes,
            kv_read_s=self.fetched.seconds,
            decode_batch=load.running_requests,
            decode_context_tokens=load.running_context_tokens,
        )
        if self.fetched.error:
            report["kv_read_error"] = self.fetched.error
        if self.reload_s:
            report["reload_s"] = self.reload_s
        return report
