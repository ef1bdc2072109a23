"""Reads of KV that a round needs from another worker, where reading is predicted to be faster than computing."""

from __future__ import annotations

from contextlib import suppress

from ampd.errors import UserError
from ampd.perf.corrections import READ, CorrectedModel
from ampd.serving.kv_tiers import longest_read_s, reading_pays, reusable_tokens
from ampd.types import Parallelism
from workers.engines.base import Engine
from workers.kv.exchange import KvFetch
from workers.round_progress import RoundProgress

_LEAST_READ_S = 0.005
"""Shorter reads are not compared with their predicted times, because they are mostly delays of the processes."""


class KvReads:
    """The reads of one worker.

    Args:
        model: predicts the times of a read and of a computation, and learns those of reads.
        timeout_s: longest time for one read; most are given up sooner, see `longest_read_s`.
    """

    def __init__(self, engine: Engine, model: CorrectedModel, timeout_s: float) -> None:
        self._engine = engine
        self._model = model
        self._timeout_s = timeout_s
        self._begun = self._running = 0

    async def read(
        self, progress: RoundProgress, source: str, expected_tokens: int, source_tp: int | None = None
    ) -> KvFetch | None:
        """Read what is missing here of a prompt's KV from the worker `source`; None: it is computed here instead.

        Args:
            expected_tokens: of the prompt's KV, from its start, that the source is expected to hold.
            source_tp: tensor parallelism of the source; None: as here.
        """
        kv, info = self._engine.kv, self._engine.info
        prompt_tokens, page = progress.prompt.tokens, info.page_size_tokens
        keys = progress.prompt.page_keys[: reusable_tokens(prompt_tokens, prompt_tokens, page) // page]
        held_tokens = kv.protect(progress.rid, keys)
        peer = info.parallelism if source_tp is None else Parallelism(source_tp)
        if not reading_pays(prompt_tokens, held_tokens, expected_tokens, self._model, info.parallelism, peer):
            return None
        timeout_s = longest_read_s(self._timeout_s, held_tokens, expected_tokens, self._model, info.parallelism, peer)
        self._begun += 1
        self._running += 1
        number, is_alone = self._begun, self._running == 1
        try:
            fetched = await kv.fetch(progress.rid, keys, held_tokens, source, timeout_s, expected_tokens)
        finally:
            self._running -= 1
        if is_alone and self._begun == number and fetched.error is None:
            self._measured(fetched, peer)
        return fetched

    def _measured(self, fetched: KvFetch, peer: Parallelism) -> None:
        """A read that had this worker to itself has ended."""
        with suppress(UserError):  # the model lacks the degree of the peer
            predicted_s = self._model.kv_transfer_s(fetched.tokens, peer, self._engine.info.parallelism)
            if predicted_s >= _LEAST_READ_S:
                self._model.measured(READ, predicted_s, fetched.seconds)
