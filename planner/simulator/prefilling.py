"""The prefills that an engine has admitted, and their passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.simulator.request import SimulatedRequest

Part = tuple[int, int]
"""(KV that is there before the pass, tokens that the pass computes) of one prefill."""


class Prefilling:
    """Admitted prefills, the oldest first.

    Args:
        chunk_tokens: most tokens of a pass; 0: a pass computes all prefills whole.
    """

    __slots__ = ("_chunk_tokens", "_first_tokens", "_requests")

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._requests: list[SimulatedRequest] = []
        self._first_tokens = 0  # computed so far of the oldest prefill

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

    def parts(self) -> list[Part]:
        """The parts of the next pass, those of the oldest prefills."""
        if not self._chunk_tokens:
            return [(request.behind_tokens, request.missing_tokens) for request in self._requests]
        room, before, parts = self._chunk_tokens, self._first_tokens, []
        for request in self._requests:
            tokens = min(request.missing_tokens - before, room)
            parts.append((request.behind_tokens + before, tokens))
            room -= tokens
            before = 0
            if not room:
                break
        return parts

    def take_reload_s(self, parts: Sequence[Part]) -> float:
        """Time of the reloads of a pass that begins with these parts. A prefill's KV is reloaded in its first pass."""
        seconds = 0.0
        for request in self._requests[: len(parts)]:
            seconds += request.reload_s
            request.reload_s = 0.0
        return seconds

    def pop_done(self, parts: Sequence[Part]) -> list[SimulatedRequest]:
        """Count a finished pass, and remove the prefills that are complete with it."""
        done: list[SimulatedRequest] = []
        for place, (_, tokens) in enumerate(parts):
            request = self._requests[place]
            self._first_tokens += tokens
            if self._first_tokens < request.missing_tokens:
                break
            done.append(request)
            self._first_tokens = 0
        del self._requests[: len(done)]
        return done
