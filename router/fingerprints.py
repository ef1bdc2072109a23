"""Logs the prefill workers that routing leaves out because of their fingerprint."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ampd.serving.placement import readable
from ampd.types import WorkerView

log = logging.getLogger(__name__)


class ForeignWorkers:
    """Logs each pair of a prefill worker and a fingerprint of decode workers that cannot read its KV once."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str, str]] = set()

    def note(self, decode: WorkerView, prefill: Sequence[WorkerView]) -> None:
        """Log the prefill workers with other weights or settings than the decode worker, if they are new."""
        ours = decode.fingerprint
        if len(readable(decode, prefill)) == len(prefill):
            return
        for view in prefill:
            pair = (view.worker_id, view.fingerprint, ours)
            if view.fingerprint not in ("", ours) and pair not in self._logged:
                self._logged.add(pair)
                log.warning(
                    "prefill worker %s has other weights or settings (fingerprint %s) than decode workers with %s: "
                    "their rounds are prefilled elsewhere",
                    *pair,
                )
