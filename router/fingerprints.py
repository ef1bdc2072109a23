"""Keeps a round inside one fingerprint: its decode worker must be able to read the KV of its prefill worker."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ampd.types import WorkerView

log = logging.getLogger(__name__)


class Fingerprints:
    """Leaves prefill workers with other weights or settings out of routing, and logs each pair once."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str, str]] = set()

    def readable(self, decode: WorkerView, prefill: Sequence[WorkerView]) -> Sequence[WorkerView]:
        """The prefill workers whose KV the decode worker can read. A worker of an older version has no fingerprint."""
        ours = decode.fingerprint
        foreign = [view for view in prefill if ours and view.fingerprint not in ("", ours)]
        if not foreign:
            return prefill
        for view in foreign:
            self._log_once(view, ours)
        return [view for view in prefill if view.fingerprint in ("", ours)]

    def _log_once(self, view: WorkerView, ours: str) -> None:
        known = (view.worker_id, view.fingerprint, ours)
        if known not in self._logged:
            self._logged.add(known)
            log.warning(
                "prefill worker %s has other weights or settings (fingerprint %s) than decode workers with %s: "
                "their rounds are prefilled elsewhere",
                *known,
            )
