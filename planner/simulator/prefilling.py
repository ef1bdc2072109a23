"""The prefills that an engine has admitted, and their passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.simulator.sequence import EngineSequence

Part = tuple[int, int]
"""(KV that is there before the pass, tokens that the pass computes) of one prefill."""


class Prefilling:
    """Admitted prefills, the oldest first.

    Args:
        chunk_tokens: most tokens of a pass; 0: a pass computes all prefills whole.
    """

    __slots__ = ("_chunk_tokens", "_first_tokens", "_sequences")

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._sequences: list[EngineSequence] = []
        self._first_tokens = 0  # computed so far of the oldest prefill

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[EngineSequence]:
        return iter(self._sequences)

    def add(self, sequence: EngineSequence) -> None:
        """Admit a prefill."""
        self._sequences.append(sequence)

    def parts(self) -> list[Part]:
        """The parts of the next pass, those of the oldest prefills."""
        if not self._chunk_tokens:
            return [(sequence.behind_tokens, sequence.missing_tokens) for sequence in self._sequences]
        room, before, parts = self._chunk_tokens, self._first_tokens, []
        for sequence in self._sequences:
            tokens = min(sequence.missing_tokens - before, room)
            parts.append((sequence.behind_tokens + before, tokens))
            room -= tokens
            before = 0
            if not room:
                break
        return parts

    def pop_done(self, parts: Sequence[Part]) -> list[EngineSequence]:
        """Count a finished pass, and remove the prefills that are complete with it."""
        done: list[EngineSequence] = []
        for sequence, (_, tokens) in zip(self._sequences, parts, strict=False):
            self._first_tokens += tokens
            if self._first_tokens < sequence.missing_tokens:
                break
            done.append(sequence)
            self._first_tokens = 0
        del self._sequences[: len(done)]
        return done
