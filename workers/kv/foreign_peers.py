"""Workers from which no KV can be read, because theirs belongs to other weights or settings."""

from __future__ import annotations

import logging
from typing import NoReturn

log = logging.getLogger(__name__)

_MOST_PEERS = 1024


class ForeignPeers:
    """Refuses such workers, and logs each of them once. A worker that starts again has another id.

    Of more than `most` workers, those that were asked for least recently are forgotten, because no round names a worker
    that is gone.
    """

    def __init__(self, most: int = _MOST_PEERS) -> None:
        self._most = most
        self._differences: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._differences)

    def check(self, worker_id: str) -> None:
        """Refuse a worker that was refused before, without asking it again. Raises as `refuse`."""
        if worker_id in self._differences:
            self.refuse(worker_id, self._differences[worker_id])

    def refuse(self, worker_id: str, difference: str) -> NoReturn:
        """Raise the error of a read. `difference`: what differs.

        Raises:
            ValueError: always.
        """
        is_new = self._differences.pop(worker_id, None) is None
        self._differences[worker_id] = difference
        if len(self._differences) > self._most:
            del self._differences[next(iter(self._differences))]
        if is_new:
            log.warning(
                "worker %s has another kind of KV than this worker (%s): nothing is read from it, its KV is computed "
                "here; do both run the same weights, engine arguments and version of SGLang?",
                worker_id,
                difference,
            )
        raise ValueError(f"{worker_id} has another kind of KV: {difference}")
