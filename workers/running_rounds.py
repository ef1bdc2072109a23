"""The rounds that decode on this worker, by its own measurements; slicing policies protect them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from ampd.types import RunningRound


@dataclass(slots=True)
class _Entry:
    """A round whose first token is out. `new`: choice -> tokens that came out here; choices advance together."""

    itl_slo_s: float
    prompt_tokens: int
    first_s: float
    handed_over: bool
    new: dict[int, int] = field(default_factory=dict)

    @property
    def new_tokens(self) -> int:
        return max(self.new.values(), default=0)


class RunningRounds:
    """Rounds by request id, from their first token (for those prefilled elsewhere: from the hand-over) to their end.

    Several choices of a round count as one: the choice that came furthest.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rounds: dict[str, _Entry] = {}
        self._ended = asyncio.Event()

    def handed_over(self, rid: str, itl_slo_s: float, prompt_tokens: int, first_s: float) -> None:
        """A round goes to the engine whose first token, the last of its prompt, came out elsewhere at `first_s`."""
        self._rounds[rid] = _Entry(itl_slo_s, prompt_tokens, first_s, handed_over=True)

    def add_tokens(self, rid: str, itl_slo_s: float, prompt_tokens: int, index: int, tokens: int) -> None:
        """New tokens of one choice came out."""
        entry = self._rounds.get(rid)
        if entry is None:
            entry = self._rounds[rid] = _Entry(itl_slo_s, prompt_tokens, self._clock(), handed_over=False)
        entry.new[index] = entry.new.get(index, 0) + tokens

    def ended(self, rid: str) -> None:
        """The round decodes no more, however it ended. A round that never began to decode is ignored."""
        if self._rounds.pop(rid, None) is not None:
            self._ended.set()

    def at(self, now_s: float) -> tuple[RunningRound, ...]:
        """All running rounds at this moment."""
        return tuple(
            RunningRound(
                entry.new_tokens + entry.handed_over,
                now_s - entry.first_s,
                entry.itl_slo_s,
                entry.prompt_tokens + entry.new_tokens,
            )
            for entry in self._rounds.values()
        )

    async def until_one_ends(self, timeout_s: float) -> None:
        """Wait until a round ends, at most for `timeout_s`."""
        self._ended.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            pass
