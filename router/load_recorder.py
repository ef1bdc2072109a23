"""Rounds of this coordinator: those that ended go to the shared state, for the leading coordinator to replay."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from ampd.background_tasks import InBackground, SupervisedTask
from ampd.recent_load import RecentRound
from ampd.state.redis_store import StateStore
from ampd.state.store import LoadedRound, StateUnavailableError
from ampd.telemetry.metrics import names
from router.decision_record import DecisionRecord
from router.served import ServedRound

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_MOST_ROUNDS = 500
"""Rounds of one coordinator in one write. Beyond them the oldest are left out, so that the record stays bounded."""


class LoadRecorder(InBackground):
    """An observer of rounds that writes them in the background. Rounds never wait for it. Those in progress stay here.

    The rounds of the last second before it is stopped are lost.

    Args:
        keep_s: how long the shared state keeps a round.
    """

    def __init__(self, store: StateStore, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._keep_s = keep_s
        self._clock = clock
        self._running: dict[int, LoadedRound] = {}
        self._ended: deque[LoadedRound] = deque(maxlen=_MOST_ROUNDS)
        self._task = SupervisedTask("load-recorder", self._run)

    def placed(self, record: DecisionRecord, arrival_s: float) -> None:
        """Take a round that is in progress from now on. It may be placed more than once."""
        kept_tokens, prompt_tokens = _prompt(record)
        self._running[id(record)] = _session(record), RecentRound(arrival_s, kept_tokens, prompt_tokens)

    def running(self) -> Sequence[LoadedRound]:
        """The rounds that are in progress here."""
        return list(self._running.values())

    def __call__(self, served: ServedRound) -> None:
        """Take a round that ended by itself. Others say nothing about the load that the workers could carry."""
        self._running.pop(id(served.record), None)
        if not served.is_complete:
            return
        record, now_s = served.record, self._clock()
        ended = RecentRound(now_s - served.lasted_s, *_prompt(record))
        ended.end(now_s, served.output_tokens, served.outcome == names.MET)
        self._ended.append((_session(record), ended))

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


def _session(record: DecisionRecord) -> str:
    return record.facts.session_key or record.facts.session_id


def _prompt(record: DecisionRecord) -> tuple[int, int]:
    """(the part of the prompt that was in its session's context before, all of it)."""
    prompt_tokens = record.decided.hist_tokens + record.decided.incr_tokens
    return min(record.kept_tokens, prompt_tokens), prompt_tokens
