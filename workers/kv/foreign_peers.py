"""Workers from which no KV can be read, because theirs belongs to other weights or settings."""

from __future__ import annotations

import logging
from typing import NoReturn

log = logging.getLogger(__name__)


class ForeignPeers:
    """Refuses such workers, and logs each of them once."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def refuse(self, worker_id: str, difference: str) -> NoReturn:
        """Raise the error of a read. `difference`: what differs.

        Raises:
            ValueError: always.
        """
        if (worker_id, difference) not in self._logged:
            self._logged.add((worker_id, difference))
            log.warning(
                "worker %s has another kind of KV than this worker (%s): nothing is read from it, its KV is computed "
                "here; do both run the same weights, engine arguments and version of SGLang?",
                worker_id,
                difference,
            )
        raise ValueError(f"{worker_id} has another kind of KV: {difference}")
