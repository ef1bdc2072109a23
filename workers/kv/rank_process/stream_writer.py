"""Copies pages into the store beside what the engine computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.kv.rank_process.rank_copies import RankCopies


class StreamWriter:
    """Copies pages into the store on a stream of its own.

    Made in the scheduler's thread, like `PageLoader`, and for the same reason.
    """

    def __init__(self, copies: RankCopies, *, on_gpu: bool) -> None:
        self._copies = copies
        self._stream = torch.cuda.Stream() if on_gpu else None

    def write(self, pool: str, slots: Sequence[int], offsets: Sequence[int]) -> None:
        """Returns when the copy has ended."""
        if self._stream is None:
            self._copies.write(pool, slots, offsets)
            return
        with torch.cuda.stream(self._stream):
            self._copies.write(pool, slots, offsets)
        self._stream.synchronize()
