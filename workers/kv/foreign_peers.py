"""Workers from which no KV can be read, because theirs belongs to other weights or settings."""

from __future__ import annotations

import logging
from typing import NoReturn

log = logging.getLogger(__name__)


class ForeignPeers:
    """Refuses such workers, and logs each of them once. A worker that starts again has another id."""

    def __init__(self) -> None:
        self._differences: dict[str, str] = {}

    def check(self, worker_id: str) -> None:
        """Refuse a worker that was refused before, without asking it again. Raises as `refuse`."""
        if worker_id in self._differences:
            self.refuse(worker_id, self._differences[worker_id])

    def refuse(self, worker_id: str, difference: str) -> NoReturn:
        """Raise the error of a read. `difference`: what differs.

        Raises:
            ValueError: always.
        """
        if worker_id not in self._differences:
            self._differences[worker_id] = difference
            log.warning(
                "worker %s has another kind of KV than this worker (%s): nothing is read from it, its KV is computed "
                "here; do both run the same weights, engine arguments and version of SGLang?",
                worker_id,
                difference,
            )
        raise ValueError(f"{worker_id} has another kind of KV: {difference}")
