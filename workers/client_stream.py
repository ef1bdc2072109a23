"""The chunks of one round for its client: the counts that the client gets, and what the coordinator is told of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from ampd.handler_stream import Chunk, Send, has_only_tokens, join_chunks
from ampd.keys import TOKEN_BYTES, pack_tokens
from ampd.round_end import LINK, Measures, RoundEnded, merged_usage
from ampd.wire import REPORT_KEY, GenerateRequest, RoundReport

MOST_HELD_S = 1.0
"""No token is held longer than this, whatever the round's ITL target."""


@contextmanager
def grouped(send: Send[Chunk], most_tokens: int, itl_slo_s: float) -> Iterator[Send[Chunk]]:
    """A `send` that passes tokens on in groups of `most_tokens`. What it still holds is sent at the end of the block.

    A token is held for at most as long as a group takes at the pace of the round's ITL target.
    """
    if most_tokens == 1:
        yield send
        return
    groups = _TokenGroups(send, most_tokens, min(MOST_HELD_S, most_tokens * itl_slo_s))
    try:
        yield groups.send
    finally:
        groups.send_held()


class _TokenGroups:
    """The chunks of one answer that are held. The choices of a round share nothing but the timer."""

    def __init__(self, send: Send[Chunk], most_tokens: int, longest_s: float) -> None:
        self._send = send
        self._most_tokens = most_tokens
        self._longest_s = longest_s
        self._held: dict[Hashable, Chunk] = {}
        self._begun: set[Hashable] = set()
        self._timer: asyncio.TimerHandle | None = None

    def send(self, chunk: Chunk) -> None:
        """Hold a chunk, or pass it on after all that was held before it."""
        choice = chunk.get("index")
        held = self._held.get(choice)
        if held is not None and join_chunks(held, chunk):
            if len(held["token_ids"]) >= self._most_tokens:
                self._pass_on(choice)
        elif not has_only_tokens(chunk):
            self.send_held()
            self._send(chunk)
        elif choice not in self._begun or len(chunk["token_ids"]) >= self._most_tokens:
            # A client waits for the first token, and a coordinator takes it as a sign that the round has begun.
            self._begun.add(choice)
            self._pass_on(choice)
            self._send(chunk)
        else:
            self._pass_on(choice)
            self._hold(choice, chunk)

    def send_held(self) -> None:
        """Pass on everything that is held."""
        for choice in list(self._held):
            self._pass_on(choice)

    def _hold(self, choice: Hashable, chunk: Chunk) -> None:
        self._held[choice] = chunk
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._longest_s, self.send_held)

    def _pass_on(self, choice: Hashable) -> None:
        chunk = self._held.pop(choice, None)
        if chunk is not None:
            self._send(chunk)
        if self._timer is not None and not self._held:
            self._timer.cancel()
            self._timer = None


SIGN_OF_LIFE_S = 60.0
"""A frontend gives a stream up after 300 s without a chunk, so that a round leaves a machine that is gone."""


class ClientStream:
    """Completes the chunks of one round and measures them, from the arrival of its request at the coordinator on.

    Attributes:
        tokens: output tokens of the first choice.
        is_told: whether the coordinator knows how the round ended.
    """

    def __init__(self, request: GenerateRequest, clock: Callable[[], float]) -> None:
        self._start = start = request["start"]
        self._clock = clock
        self._record = start["record"]
        self._arrival_s = self._last_s = clock() - start["age_s"]
        self._choices = (request["request"].get("sampling_options") or {}).get("n") or 1
        self._finished = 0
        self._ttft_s: float | None = None
        self._measures = Measures()
        self._prefill: RoundReport | None = None
        self._decode: RoundReport | None = None
        self._is_taken_over = request.get("is_prefilled", False)
        self._tokens_before = 0
        self.tokens: list[int] = []
        self.is_told = False

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended by itself."""
        return self._finished >= self._choices

    @property
    def has_begun(self) -> bool:
        """Whether the client has got tokens, or the end, of at least one choice."""
        return self._finished > 0 or self._ttft_s is not None

    @property
    def has_output(self) -> bool:
        """Whether the client has got some of the round, also from a worker that was lost."""
        return self.has_begun or self._start["continued_tokens"] > 0

    def prefill_failed(self, reason: str) -> None:
        """The prefill worker failed, and this worker prefills."""
        if self._record is not None:
            retries = self._record["retries"] + 1
            self._record |= {"route": "local", "reason": reason, "prefill_worker": None, "retries": retries}

    def prefilled(self, chunk: Chunk, finish_reason: str | None) -> Chunk:
        """The prefill worker's chunk as the first of the round, or its last, if the round ends with this token."""
        self._prefill = report = chunk.get(REPORT_KEY)
        if report is not None:
            self._measures.prefilled(report)
        self._is_taken_over = True
        dropped = ("finish_reason", "completion_usage", REPORT_KEY, *(() if finish_reason else ("stop_reason",)))
        out = {name: value for name, value in chunk.items() if name not in dropped}
        if finish_reason is not None:
            out["finish_reason"] = finish_reason
        self._tokens_before = len(chunk["token_ids"])
        return self._completed(out)

    def decoded(self, chunk: Chunk) -> Chunk:
        """A chunk of this worker's engine."""
        report = chunk.pop(REPORT_KEY, None)
        if report is not None:
            # The engine is done, so that this is the last chunk.
            self._decode = report
            (self._measures.read_increment if self._is_taken_over else self._measures.prefilled)(report)
        return self._completed(chunk)

    def _completed(self, chunk: Chunk) -> Chunk:
        token_ids, is_end = chunk.get("token_ids"), chunk.get("finish_reason") is not None
        if token_ids and not chunk.get("index"):
            self.tokens += token_ids
            self._last_s = self._clock()
        is_first = self._ttft_s is None and bool(token_ids)
        if is_first:
            self._ttft_s = self._clock() - self._arrival_s
        if is_first or (is_end and not self.has_begun):
            chunk[LINK] = self._start["link"]
        if is_end:
            self._finished += 1
            self._count(chunk)
        if self._record is not None and (is_first or (is_end and self.is_complete)):
            record = {**self._record, **self._measures.as_dict(), "ttft_s": self._ttft_s}
            chunk["engine_data"] = {**(chunk.get("engine_data") or {}), REPORT_KEY: record}
        return chunk

    def _count(self, chunk: Chunk) -> None:
        """Complete the usage in the last chunk of a choice."""
        usage: Mapping[str, Any] | None = chunk.get("completion_usage")
        continued_tokens = self._start["continued_tokens"]
        if self._tokens_before or continued_tokens or self._prefill:
            own = 0 if usage is None else usage.get("completion_tokens") or 0
            cached_tokens = self._prefill["cached_tokens"] if self._prefill else None
            chunk["completion_usage"] = merged_usage(
                usage, self._start["prompt_tokens"], continued_tokens + self._tokens_before + own, cached_tokens
            )

    def ended(
        self,
        outcome: Literal["complete", "left", "failed"],
        *,
        status: int = 0,
        message: str = "",
        goes_on: bool = False,
        start: int | None = None,
    ) -> RoundEnded:
        """How the round ended, for its coordinator."""
        self.is_told = True
        gaps = len(self.tokens) - 1
        ttft_s = self._ttft_s
        return RoundEnded(
            self._start["request_id"],
            outcome,
            pack_tokens(self.tokens),
            self.has_begun,
            ttft_s,
            (self._last_s - self._arrival_s - ttft_s) / gaps if ttft_s is not None and gaps > 0 else None,
            self._prefill,
            self._decode,
            status,
            message,
            goes_on,
            start,
        )


def ends_at_prefill(chunk: Chunk, request: GenerateRequest, context_limit: int) -> str | None:
    """The finish reason if the round is over with the first token, sampled on a prefill worker; else None.

    The prefill worker was asked for a single token, so its own `length` does not end the round.

    Args:
        chunk: the prefill worker's chunk with the first token.
        context_limit: longest context of this worker.
    """
    reason = chunk.get("finish_reason")
    if reason not in (None, "length"):
        return str(reason)
    stops = request["request"].get("stop_conditions") or {}
    if not stops.get("min_tokens") and any(token in _stop_token_ids(request) for token in chunk["token_ids"]):
        return "stop"
    max_tokens = stops.get("max_tokens")
    if max_tokens is not None and max_tokens <= 1:
        return "length"
    return "length" if len(request["prompt"]) // TOKEN_BYTES + 1 >= context_limit else None


def _stop_token_ids(request: GenerateRequest) -> frozenset[int]:
    engine, stops = request["request"], request["request"].get("stop_conditions") or {}
    if stops.get("ignore_eos"):
        return frozenset()
    names = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
    return frozenset(engine.get("eos_token_ids") or ()).union(*(stops.get(name) or () for name in names))


@contextmanager
def signs_of_life(send: Send[Chunk]) -> Iterator[Send[Chunk]]:
    """A `send` beside which an empty chunk is sent from time to time, if there was no other."""
    signs = _Signs(send)
    try:
        yield signs.send
    finally:
        signs.end()


class _Signs:
    def __init__(self, send: Send[Chunk]) -> None:
        self._send = send
        self._has_sent = False
        self._wait()

    def send(self, chunk: Chunk) -> None:
        self._has_sent = True
        self._send(chunk)

    def end(self) -> None:
        self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(SIGN_OF_LIFE_S, self._sign)

    def _sign(self) -> None:
        if not self._has_sent:
            self._send({"token_ids": [], "index": 0})
        self._has_sent = False
        self._wait()
