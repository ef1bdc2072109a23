"""Reports of workers about their part of a round, checked before decisions use them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

from ampd.state.checks import Check, check_count, check_counts, check_duration, check_text
from ampd.wire import REPORT_KEY, RoundReport

log = logging.getLogger(__name__)

_REQUIRED: Mapping[str, Check] = {
    **dict.fromkeys(("held_tokens", "cached_tokens", "kv_read_tokens", "kv_read_bytes"), check_count),
    **dict.fromkeys(("queued_s", "prefill_s", "kv_read_s"), check_duration),
}
_OPTIONAL: Mapping[str, Check] = {
    **dict.fromkeys(("slices", "decode_batch", "decode_context_tokens"), check_count),
    "reload_s": check_duration,
    "kv_read_error": check_text,
    "hit_tokens": check_counts,
}
_PAIR = ("decode_batch", "decode_context_tokens")


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
    if not isinstance(value, Mapping):
        raise ValueError("it is no object")
    if missing := [name for name in _REQUIRED if name not in value]:
        raise ValueError(f"{', '.join(missing)} is missing")
    if (_PAIR[0] in value) != (_PAIR[1] in value):
        raise ValueError(f"{_PAIR[0]} and {_PAIR[1]} belong together")
    parts = {name: value[name] for name in (*_REQUIRED, *_OPTIONAL) if name in value}
    for name, part in parts.items():
        try:
            (_REQUIRED.get(name) or _OPTIONAL[name])(part)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return cast(RoundReport, parts)
