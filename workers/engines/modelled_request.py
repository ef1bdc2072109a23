"""One request inside the modelled engine: its limits, its choices and their tokens; and the time that it takes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ampd.serving.kv_tiers import Tiers
from ampd.serving.pass_sizes import is_taken_over
from ampd.types import RunningRound
from workers.engines.base import EngineError, EngineOutput, EngineRequest, output_room
from workers.engines.modelled_tokens import ContextHash, Token, TokenSource
from workers.engines.replies import PlannedOutput

_MAX_RESERVED_TOKENS = 4096
"""New tokens that admission counts on at most; longer outputs take room as they come."""

_MAX_LAG_S = 0.1
"""How far behind its own time line the engine may fall and still catch up by not sleeping."""


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """When a choice ends, and how many log-probabilities come with its tokens."""

    max_new_tokens: int
    min_tokens: int
    ends: frozenset[int]
    stops: frozenset[int]
    eos_token_id: int | None
    choices: int
    logprobs: int | None

    @classmethod
    def of(cls, request: EngineRequest, max_context_tokens: int, eos_token_ids: tuple[int, ...]) -> OutputLimits:
        """Read a request.

        Raises:
            EngineError: 400 because the request cannot be served.
        """
        sampling, stop = _part(request, "sampling_options"), _part(request, "stop_conditions")
        eos = tuple(request.request.get("eos_token_ids") or eos_token_ids)
        ignore = bool(stop.get("ignore_eos"))
        stops = frozenset(stop.get("stop_token_ids") or ())
        hidden = frozenset(stop.get("stop_token_ids_hidden") or ())
        return cls(
            max_new_tokens=output_room(request, max_context_tokens),
            min_tokens=int(stop.get("min_tokens") or 0),
            ends=hidden | (frozenset() if ignore else frozenset(eos)),
            stops=stops,
            eos_token_id=eos[0] if eos and not ignore else None,
            choices=max(1, int(sampling.get("n") or 1)),
            logprobs=_count(_part(request, "output_options").get("logprobs")),
        )


@dataclass(slots=True)
class Choice:
    """One of a request's n outputs."""

    index: int
    state: ContextHash
    tokens: list[int] = field(default_factory=list)
    finished: bool = False


class ActiveRequest:
    """A request from submission to its end.

    Attributes:
        keys: names of the prompt's full pages.
        plan: the output that is not made up; None: all of it is.
        tiers: where the KV of the prompt was at admission. reload_s: how long the part from the store took.
        device_pages: pages of its context that it uses on the device.
        passed_tokens: of the missing part of its prompt, those of passes that have ended.
        first_s: when its first token came, here or elsewhere; None: it has not come.
        prefilled: its prompt's KV is there. settled: its pages were handed to its session.
        aborted: its caller has gone.
    """

    def __init__(
        self, request: EngineRequest, limits: OutputLimits, keys: list[bytes], plan: PlannedOutput | None = None
    ) -> None:
        self.request = request
        self.plan = plan
        self.limits = limits
        self.keys = keys
        self.tiers = Tiers(0, 0, 0, self.prompt_tokens)
        self.reload_s = 0.0
        self.device_pages = 0
        self.passed_tokens = 0
        self.first_s: float | None = request.first_s
        self.prefilled = False
        self.settled = False
        self.aborted = asyncio.Event()
        self.outputs: asyncio.Queue[EngineOutput | EngineError] = asyncio.Queue()
        state = ContextHash(request.token_ids)
        self.choices = [Choice(index, state.copy()) for index in range(limits.choices)]

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def decoding(self) -> list[Choice]:
        return [choice for choice in self.choices if not choice.finished]

    @property
    def context_tokens(self) -> int:
        """KV that the choices still decoding read in one step."""
        return sum(self.prompt_tokens + len(choice.tokens) for choice in self.choices if not choice.finished)

    @property
    def left_tokens(self) -> int:
        """The missing part of its prompt that no pass has computed yet."""
        return self.tiers.computed_tokens - self.passed_tokens

    @property
    def part(self) -> tuple[int, int]:
        """(KV that is there, tokens that are left) of its prompt."""
        return self.prompt_tokens - self.left_tokens, self.left_tokens

    def is_taken_over(self, missing_tokens: int, page_tokens: int) -> bool:
        """Whether it was prefilled elsewhere and has its KV, if so many tokens of its prompt are missing."""
        return is_taken_over(self.request.first_s is not None, missing_tokens, page_tokens)

    def running_round(self, now_s: float) -> RunningRound:
        """The request as a round that decodes."""
        request = self.request
        tokens = max(len(choice.tokens) for choice in self.choices)
        return RunningRound(
            max(tokens + (request.first_s is not None), 1),
            0.0 if self.first_s is None else now_s - self.first_s,
            inf if request.task is None else request.task.slo.itl_s,
            self.prompt_tokens + tokens,
        )

    @property
    def private_tokens(self) -> int:
        """KV of this request beside the pages that it uses: its output, and what is missing of its prompt."""
        return sum(len(choice.tokens) for choice in self.choices) + self._missing_tokens

    @property
    def reserved_tokens(self) -> int:
        """Room that admission sets aside beside the pages: the prompt's missing part and the output to come."""
        produced = sum(len(choice.tokens) for choice in self.choices)
        output = max(produced, min(self.limits.max_new_tokens, _MAX_RESERVED_TOKENS) * len(self.choices))
        return output + self._missing_tokens

    @property
    def _missing_tokens(self) -> int:
        """Prompt tokens that are not on the device yet."""
        return 0 if self.prefilled else self.prompt_tokens - self.tiers.device_tokens

    def advance(self, choice: Choice, source: TokenSource) -> None:
        """Give a choice its next token and output it."""
        limits = self.limits
        may_end = len(choice.tokens) + 1 > limits.min_tokens
        eos_token_id = limits.eos_token_id if may_end else None
        token = source.choose(
            choice.state, choice.index, eos_token_id, limits.logprobs or 0, self._planned(choice, eos_token_id)
        )
        choice.state.push(token.token_id)
        choice.tokens.append(token.token_id)
        output = EngineOutput([token.token_id], choice.index)
        self._report(output, token)
        if may_end and token.token_id in limits.stops:
            output.finish_reason, output.stop_reason = "stop", token.token_id
        elif (may_end and token.token_id in limits.ends) or self._is_all(choice):
            output.finish_reason = "stop"
        elif len(choice.tokens) >= limits.max_new_tokens:
            output.finish_reason = "length"
        self._close(choice, output)

    def _planned(self, choice: Choice, eos_token_id: int | None) -> int | None:
        """A choice's next token by the plan, which is followed by an end of sequence; None: it is made up."""
        if self.plan is None:
            return None
        at, token_ids = len(choice.tokens), self.plan.token_ids
        return token_ids[at] if at < len(token_ids) else eos_token_id if at == len(token_ids) else None

    def _is_all(self, choice: Choice) -> bool:
        """Whether a choice has reached the end of a plan after which nothing may follow."""
        return self.plan is not None and self.plan.is_all and len(choice.tokens) >= len(self.plan.token_ids)

    def close_empty(self) -> None:
        """End a request that asked for no tokens."""
        for choice in self.choices:
            self._close(choice, EngineOutput([], choice.index, finish_reason="length"))

    def _report(self, output: EngineOutput, token: Token) -> None:
        if self.limits.logprobs is not None:
            output.log_probs = [token.log_prob]
            if self.limits.logprobs:
                output.top_logprobs = [list(token.top)]

    def _close(self, choice: Choice, output: EngineOutput) -> None:
        choice.finished = output.finish_reason is not None
        output.prompt_tokens = self.prompt_tokens
        output.completion_tokens = len(choice.tokens)
        output.cached_tokens = self.tiers.reused_tokens
        output.reloaded_tokens, output.reload_s = self.tiers.reloaded_tokens, self.reload_s
        self.outputs.put_nowait(output)


@dataclass(slots=True)
class ActiveRequests:
    """The requests of an engine, by how far they have come.

    Attributes:
        alive: all of them.
        waiting: those that are not admitted. prefilling: those whose prompt is computed. running: those that decode.
    """

    alive: set[ActiveRequest] = field(default_factory=set)
    waiting: deque[ActiveRequest] = field(default_factory=deque)
    prefilling: list[ActiveRequest] = field(default_factory=list)
    running: list[ActiveRequest] = field(default_factory=list)


class TimeLine:
    """Sleeps for modelled times: modelled work follows modelled work, however late a sleep wakes up.

    Sleeps aim at points of one time line, so that late wake-ups do not add up.
    """

    def __init__(self) -> None:
        self._end_s = 0.0
        self._wake = asyncio.Event()

    def now_s(self) -> float:
        """The present time, on the clock of the worker."""
        return time.monotonic()

    def wake(self) -> None:
        """There may be work again: end a pause."""
        self._wake.set()

    async def pause(self) -> None:
        """Sleep until `wake`."""
        self._wake.clear()
        await self._wake.wait()
        self.restart()

    def restart(self) -> None:
        """Begin at the present time, after a pause without work."""
        self._end_s = time.monotonic()

    async def work(self, seconds: float, interrupt: asyncio.Event | None = None) -> None:
        """Let modelled work take its time; `interrupt` ends it early."""
        now_s = time.monotonic()
        self._end_s = max(self._end_s, now_s - _MAX_LAG_S) + seconds
        delay_s = self._end_s - now_s
        if delay_s <= 0:
            await asyncio.sleep(0)
        elif interrupt is None:
            await asyncio.sleep(delay_s)
        else:
            try:
                async with asyncio.timeout(delay_s):
                    await interrupt.wait()
                self.restart()
            except TimeoutError:
                pass


def _part(request: EngineRequest, name: str) -> dict[str, Any]:
    part: dict[str, Any] = request.request.get(name) or {}
    return part


def _count(value: Any) -> int | None:
    return None if value is None or value is False else int(value)
