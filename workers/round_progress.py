"""The measurements of one round on one worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ampd.types import PrefillTask
from ampd.wire import RoundReport
from workers.engines.base import EngineLoad, EngineOutput
from workers.kv.exchange import KvFetch
from workers.slices import Sliced


@dataclass(slots=True)
class RoundProgress:
    """How far a round has come here. Times are on the worker's clock.

    Attributes:
        rid: id of the engine's request.
        page_keys: keys of the prompt's full pages; they are hashed once and passed to the engine and its KV exchange.
        handed_over_s: when the round's first token, sampled elsewhere, came with the request; None: it is sampled here.
        sliced: the slices that were computed before the round's own call of the engine.
        last_token_s: when the last token of each choice came out here.
    """

    rid: str
    task: PrefillTask
    prompt_tokens: int
    arrived_s: float
    page_keys: Sequence[bytes] = ()
    started_s: float = 0.0
    handed_over_s: float | None = None
    prefill_s: float = 0.0
    cached_tokens: int = 0
    sliced: Sliced | None = None
    fetched: KvFetch = field(default_factory=KvFetch)
    last_token_s: dict[int, float] = field(default_factory=dict)

    @property
    def queued_s(self) -> float:
        """Wait in the queue, without the read of the history."""
        return max(0.0, self.started_s - self.arrived_s - self.fetched.seconds)

    @property
    def slices(self) -> int:
        """Calls of the engine for the prefill; the round's own is the last one."""
        return self.sliced.slices + 1 if self.sliced else 1

    def set_cached_tokens(self, output: EngineOutput) -> None:
        """Replace the engine's count, because the last slice finds the earlier ones in the cache."""
        if self.sliced and self.sliced.slices:
            output.cached_tokens = self.sliced.cached_tokens
        self.cached_tokens = output.cached_tokens

    def begins_to_decode(self) -> bool:
        """Whether no token has come out here yet although the round's first token came from elsewhere."""
        return not self.last_token_s and self.handed_over_s is not None

    def gap_s(self, index: int, tokens: int, now_s: float) -> float | None:
        """Mean time per token since the choice's last output; None for the round's first token."""
        before_s = self.last_token_s.get(index, self.handed_over_s)
        self.last_token_s[index] = now_s
        return None if before_s is None else (now_s - before_s) / tokens

    def report(self, load: EngineLoad, held_tokens: int) -> RoundReport:
        """The report for the coordinator, in the round's last chunk."""
        report = RoundReport(
            held_tokens=held_tokens,
            cached_tokens=self.cached_tokens,
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
        if self.slices > 1:
            report["slices"] = self.slices
        return report
