"""Fingerprints of weights and settings: which workers may continue an answer, and which ones are logged as foreign."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

from ampd.serving.placement import readable
from ampd.types import WorkerView

log = logging.getLogger(__name__)


def mark_of(fingerprint: str) -> int:
    """32 bits of a fingerprint, because the link of a first chunk has no room for more; 0: it is not known."""
    return (zlib.crc32(fingerprint.encode()) or 1) if fingerprint else 0


def may_continue(mark: int, worker: WorkerView) -> bool:
    """Whether a worker may continue output of workers with this mark; a worker of an older version always may."""
    return not mark or not worker.fingerprint or mark_of(worker.fingerprint) == mark


class ForeignWorkers:
    """Logs workers with other weights or settings than the others.

    Each pair of a prefill worker and a fingerprint of decode workers that cannot read its KV is logged once, and each
    decode worker once.

    Args:
        knows: whether a worker is alive. The others are forgotten.
    """

    def __init__(self, knows: Callable[[str], bool]) -> None:
        self._knows = knows
        self._logged: set[tuple[str, str, str]] = set()

    def note(self, decode: WorkerView, prefill: Sequence[WorkerView]) -> None:
        """Log the prefill workers with other weights or settings than the decode worker, if they are new."""
        ours = decode.fingerprint
        if len(readable(decode, prefill)) == len(prefill):
            return
        for view in prefill:
            if view.fingerprint not in ("", ours) and self._is_new(view.worker_id, view.fingerprint, ours):
                log.warning(
                    "prefill worker %s has other weights or settings (fingerprint %s) than decode workers with %s: "
                    "their rounds are prefilled elsewhere",
                    view.worker_id,
                    view.fingerprint,
                    ours,
                )

    def note_decode(self, decode: Sequence[WorkerView]) -> None:
        """Log the decode workers with other weights or settings than most decode workers, if they are new."""
        counts = Counter(view.fingerprint for view in decode if view.fingerprint)
        if len(counts) < 2:
            return
        usual = counts.most_common(1)[0][0]
        for view in decode:
            if view.fingerprint not in ("", usual) and self._is_new(view.worker_id, view.fingerprint, ""):
                log.warning(
                    "decode worker %s has other weights or settings (fingerprint %s) than most decode workers (%s): "
                    "new sessions are bound to it all the same",
                    view.worker_id,
                    view.fingerprint,
                    usual,
                )

    def _is_new(self, worker_id: str, fingerprint: str, ours: str) -> bool:
        if (worker_id, fingerprint, ours) in self._logged:
            return False
        self._logged = {logged for logged in self._logged if self._knows(logged[0])}
        self._logged.add((worker_id, fingerprint, ours))
        return True
