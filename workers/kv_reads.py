"""Reads of KV that a round needs from another worker, where reading is predicted to be faster than computing."""

from __future__ import annotations

from ampd.perf.model import PerformanceModel
from ampd.serving.kv_tiers import longest_read_s, reading_pays, reusable_tokens
from ampd.types import Parallelism
from workers.engines.base import Engine
from workers.kv.exchange import KvFetch
from workers.round_progress import RoundProgress


class KvReads:
    """The reads of one worker.

    Args:
        model: predicts the times of a read and of a computation.
        timeout_s: longest time for one read; most are given up sooner, see `longest_read_s`.
    """

    def __init__(self, engine: Engine, model: PerformanceModel, timeout_s: float) -> None:
        self._engine = engine
        self._model = model
        self._timeout_s = timeout_s

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
        return await kv.fetch(progress.rid, keys, held_tokens, source, timeout_s, expected_tokens)
