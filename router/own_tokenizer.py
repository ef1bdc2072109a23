"""Which workers have the tokenizer of the frontends, so that their token ids mean the same text."""

from __future__ import annotations

import logging

from ampd.types import WorkerView

log = logging.getLogger(__name__)


class OwnTokenizer:
    """Accepts workers whose tokenizer is the frontends' one, or not known, and logs the first worker of each other one.

    Args:
        digest: of the folder that the coordinator registers at the frontends; "": not known, so every worker fits.
    """

    def __init__(self, digest: str) -> None:
        self._digest = digest
        self._logged: set[str] = set()

    def serves(self, worker: WorkerView) -> bool:
        """Whether a worker may serve rounds of these frontends."""
        if worker.tokenizer in ("", self._digest) or not self._digest:
            return True
        if worker.tokenizer not in self._logged:
            self._logged.add(worker.tokenizer)
            log.error(
                "worker %s has another tokenizer (%s) than this coordinator's --model (%s), so its tokens mean another "
                "text: workers with it get no rounds from here. Give both the same model folder, or the workers "
                "another namespace",
                worker.worker_id,
                worker.tokenizer,
                self._digest,
            )
        return False
