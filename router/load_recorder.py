"""Rounds that ended here, written to the shared state: the recent load, which the leading coordinator may replay."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from ampd.recent_load import RecentRound
from ampd.state.store import LoadedRound, StateStore, StateUnavailableError
from ampd.supervised_task import InBackground, SupervisedTask
from ampd.telemetry.metrics import names
from router.served import ServedRound

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_MOST_ROUNDS = 500
"""Rounds of one coordinator in one write. Beyond them the oldest are left out, so that the record stays bounded."""


class LoadRecorder(InBackground):
    """An observer of rounds that writes them in the background. Rounds never wait for it.

    The rounds of the last second before it is stopped are lost.

    Args:
        keep_s: how long the shared state keeps a round.
    """

    def __init__(self, store: StateStore, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._keep_s = keep_s
        self._clock = clock
        self._ended: deque[LoadedRound] = deque(maxlen=_MOST_ROUNDS)
        self._task = SupervisedTask("load-recorder", self._run)

    def __call__(self, served: ServedRound) -> None:
        """Take a round that ended by itself. Others say nothing about the load that the workers could carry."""
        if not served.is_complete:
            return
        record, now_s = served.record, self._clock()
        # History whose KV was lost is recomputed here, but would not have to be with other roles.
        kept_tokens = record.hist_tokens + record.hit_tokens.get("recomputed", 0)
        prompt_tokens = record.hist_tokens + record.incr_tokens
        ended = RecentRound(now_s - served.lasted_s, min(kept_tokens, prompt_tokens), prompt_tokens)
        ended.end(now_s, served.output_tokens, served.outcome == names.MET)
        self._ended.append((record.session_key or record.session_id, ended))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self.write()

    async def write(self) -> None:
        """Write what has ended since the last write."""
        if not self._ended:
            return
        ended = list(self._ended)
        self._ended.clear()
        try:
            await self._store.record_load(ended, self._keep_s)
        except StateUnavailableError as error:
            log.debug("%d rounds are missing in the recent load: %s", len(ended), error)
