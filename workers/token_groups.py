"""Holds a round's tokens back until there are several, because each chunk costs its readers the same."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from ampd.handler_stream import Chunk, Send, has_only_tokens, join_chunks

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
