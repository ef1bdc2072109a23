"""Reports of workers about their part of a round, checked before decisions use them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from ampd.wire import REPORT_KEY, RoundReport

log = logging.getLogger(__name__)


class WorkerReports:
    """Reads reports. The first malformed one of each worker is logged, because such a worker sends one per round."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def of(self, chunk: Mapping[str, Any], worker_id: str) -> RoundReport | None:
        """The report in a worker's chunk. A malformed one counts as none."""
        value = chunk.get(REPORT_KEY)
        try:
            return None if value is None else parse_report(value)
        except ValueError as error:
            if worker_id not in self._warned:
                self._warned.add(worker_id)
                log.warning(
                    "worker %s: its report of a round is not used (this is logged once per worker): %s",
                    worker_id,
                    error,
                )
            return None


def parse_report(value: Any) -> RoundReport:
    """Check a report; keys that are not known are left out.

    Raises:
        ValueError: a part is missing, of another type, or no possible number.
    """
    report = msgspec.convert(value, RoundReport)
    if ("decode_batch" in report) != ("decode_context_tokens" in report):
        raise ValueError("decode_batch and decode_context_tokens belong together")
    return report
