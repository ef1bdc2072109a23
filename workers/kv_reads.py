"""Reads of KV that a round needs from another worker, where reading is predicted to be faster than computing."""

from __future__ import annotations

from ampd.perf.model import PerformanceModel
from ampd.serving.kv_tiers import Found, reading_pays
from workers.engines.base import Engine
from workers.kv.exchange import KvFetch
from workers.round_progress import RoundProgress


class KvReads:
    """The reads of one worker.

    Args:
        model: predicts the times of a read and of a computation.
        timeout_s: longest time for one read.
    """

    def __init__(self, engine: Engine, model: PerformanceModel, timeout_s: float) -> None:
        self._engine = engine
        self._model = model
        self._timeout_s = timeout_s

    async def read(
        self, progress: RoundProgress, token_ids: list[int], source: str, expected_tokens: int
    ) -> KvFetch | None:
        """Read what is missing here of a prompt's KV from the worker `source`; None: it is computed here instead.

        Args:
            expected_tokens: of the prompt's KV, from its start, that the source is expected to hold.
        """
        if not await self._pays(progress, expected_tokens):
            return None
        return await self._engine.kv.fetch(
            progress.rid, progress.task.session_id, token_ids, source, self._timeout_s, progress.page_keys
        )

    async def _pays(self, progress: RoundProgress, expected_tokens: int) -> bool:
        reply = await self._engine.kv.serve({"op": "match", "keys": list(progress.page_keys)})
        info = self._engine.info
        found = Found(store_tokens=reply.get("matched", 0) * info.page_size_tokens, peer_tokens=expected_tokens)
        return reading_pays(progress.prompt_tokens, found, self._model, info.parallelism)
