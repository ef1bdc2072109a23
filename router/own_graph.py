"""Which workers can serve the rounds of this coordinator: token ids mean the same text, and they accept its calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ampd.call_signatures import MAX_AGE_S, secret_mark
from ampd.types import WorkerView

log = logging.getLogger(__name__)


class OwnGraph:
    """Accepts the workers that fit, and logs the first worker for each reason against one.

    A coordinator that no worker fits stays out of discovery. So rounds go to another one where the reason is its own.

    Args:
        tokenizer: digest of the folder that the coordinator registers at the frontends; "": not known, so that each
            worker fits.
        clock: as that of `ampd.call_signatures`.
    """

    def __init__(self, tokenizer: str, clock: Callable[[], float] = time.time) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._mark = ""
        self._logged: set[str] = set()

    def sign_with(self, keys: tuple[bytes, ...]) -> None:
        """The secrets of the graph. Calls are signed with the first one."""
        self._mark = secret_mark(keys[0]) if keys else ""

    def serves(self, worker: WorkerView) -> bool:
        """Whether a worker that has just published itself may get rounds from here."""
        reason = self._misfit(worker)
        if reason and reason not in self._logged:
            self._logged.add(reason)
            log.error("worker %s %s: such workers get no rounds from here", worker.worker_id, reason)
        return not reason

    def _misfit(self, worker: WorkerView) -> str:
        if worker.tokenizer not in ("", self._tokenizer) and self._tokenizer:
            return (
                f"has another tokenizer ({worker.tokenizer}) than this coordinator's --model ({self._tokenizer}), so "
                "its tokens mean another text; give both the same model folder, or the workers another namespace"
            )
        if worker.secrets and self._mark not in worker.secrets:
            return "does not have the secret of this coordinator, and would refuse its calls; see --graph-secret-file"
        if worker.secrets and worker.clock_s and abs(worker.clock_s - self._clock()) > MAX_AGE_S:
            return f"has a clock that differs by more than {MAX_AGE_S:g} s, and would refuse this coordinator's calls"
        return ""
