"""The chunks of one round on their way to the client: what has come out so far, and the counts that the client gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ampd.handler_stream import Chunk
from ampd.types import WorkerView
from ampd.wire import REPORT_KEY
from router.continuation import LINK, link
from router.decision_record import DecisionRecord
from router.fingerprints import mark_of
from router.outputs import merged_usage
from router.request import RoundRequest
from router.served import ServedRound


class ClientStream:
    """Completes the chunks of one round and measures them, from the arrival of its request on.

    Attributes:
        arrival_s: when the request came to this coordinator.
        emitted: output tokens of the first choice.
        prefilled_cached_tokens: prompt tokens that a prefill worker found in its cache; None: it was not asked.
    """

    def __init__(self, request: RoundRequest, record: DecisionRecord, clock: Callable[[], float]) -> None:
        self._request = request
        self._record = record
        self._clock = clock
        self.arrival_s = self._last_s = clock()
        self._finished_choices = 0
        self._fingerprint_mark = request.continued_mark
        self.emitted: list[int] = []
        self.prefilled_cached_tokens: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended by itself."""
        return self._finished_choices >= self._request.choices

    @property
    def has_finished_choice(self) -> bool:
        """Whether at least one choice has ended."""
        return self._finished_choices > 0

    @property
    def has_begun(self) -> bool:
        """Whether the client has got tokens, or the end, of at least one choice."""
        return self.has_finished_choice or self._record.ttft_s is not None

    @property
    def has_output(self) -> bool:
        """Whether the client has got some of the round, also from a coordinator that died."""
        return self.has_begun or self._request.continued_tokens > 0

    @property
    def waits_since_s(self) -> float:
        """When the wait began that a placement now would end: TTFT counts from the arrival, later gaps from now."""
        return self._clock() if self.has_output else self.arrival_s

    @property
    def fingerprint_mark(self) -> int:
        """Of the weights that the output so far came from; 0: there is no output, or they are not known."""
        return self._fingerprint_mark if self.emitted or self._request.continued_tokens else 0

    def placed(self, decode: WorkerView) -> None:
        """The next tokens come from this decode worker, or from a prefill worker whose KV it can read."""
        if not self.emitted and not self._request.continued_tokens:
            self._fingerprint_mark = mark_of(decode.fingerprint)

    def count(self, chunk: Chunk) -> None:
        """Count a chunk's tokens; the first chunk with tokens sets the TTFT."""
        token_ids = chunk.get("token_ids")
        if not token_ids:
            return
        now_s = self._clock()
        if not chunk.get("index"):
            self.emitted += token_ids
            self._last_s = now_s
        if self._record.ttft_s is None:
            chunk[LINK] = link(self._record.facts.trace_id, self._request.client_prompt_tokens, self._fingerprint_mark)
            self._record.ttft_s = now_s - self.arrival_s
            if self._request.wants_record:
                self._attach_record(chunk)

    def finish_choice(self, chunk: Chunk, tokens_before: int, *, has_report: bool) -> None:
        """Complete the last chunk of a choice: its usage, and with the last choice the decision record.

        Args:
            tokens_before: output tokens that came out before the worker call that ended the choice.
            has_report: the chunk carried the worker's report.
        """
        self._finished_choices += 1
        usage: Mapping[str, Any] | None = chunk.get("completion_usage")
        continued_tokens = self._request.continued_tokens
        if tokens_before or continued_tokens or self.prefilled_cached_tokens is not None:
            completion_tokens = continued_tokens + tokens_before + ((usage or {}).get("completion_tokens") or 0)
            chunk["completion_usage"] = merged_usage(
                usage, self._request.client_prompt_tokens, completion_tokens, self.prefilled_cached_tokens
            )
        if self._request.wants_record and (has_report or self.is_complete):
            self._attach_record(chunk)

    def served(self, *, is_initial: bool, was_left: bool) -> ServedRound:
        """The round as far as it came."""
        ttft_s, gaps = self._record.ttft_s, len(self.emitted) - 1
        itl_s = (self._last_s - self.arrival_s - ttft_s) / gaps if ttft_s is not None and gaps > 0 else None
        return ServedRound(
            self._record,
            self._request.slo,
            is_initial=is_initial,
            is_complete=self.is_complete,
            ttft_s=ttft_s,
            itl_s=itl_s,
            output_tokens=len(self.emitted),
            was_left=was_left,
            lasted_s=self._clock() - self.arrival_s,
        )

    def _attach_record(self, chunk: Chunk) -> None:
        chunk["engine_data"] = {**(chunk.get("engine_data") or {}), REPORT_KEY: self._record.as_dict()}
