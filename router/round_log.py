"""The log lines of a round in the coordinator: its placement and its end."""

from __future__ import annotations

import logging
from typing import Any

from ampd.telemetry.logs import RoundLog, log_fields
from router.decision_record import DecisionRecord, Observer

log = logging.getLogger(__name__)

_PLACED = (
    "route reason decode_worker prefill_worker epoch hist_tokens incr_tokens shared_tokens estimates rewritten policy "
    "clamped_targets retries session_key"
)
_ENDED = (
    "outcome route reason decode_worker prefill_worker is_initial hist_tokens incr_tokens output_tokens ttft_s itl_s "
    "lasted_s retries session_key"
)
_MEASURED = (
    "cached_tokens queued_s prefill_s kv_read_bytes_history kv_read_s_history kv_read_bytes_increment "
    "kv_read_s_increment kv_reload_s"
)


def log_placed(wanted: RoundLog, record: DecisionRecord) -> None:
    """Log a decision and its estimates. A round whose worker is lost is placed, and logged, again."""
    if log.isEnabledFor(wanted.step_level):
        targets = {"ttft_target_s": record.slo.ttft_s, "itl_target_s": record.slo.itl_s}
        log_fields(log, wanted.step_level, "round placed", **_chosen(record, _PLACED), **targets)


def end_logger(wanted: RoundLog) -> Observer:
    """An observer that logs one line at the end of each round."""

    def log_end(record: DecisionRecord) -> None:
        measures = record.measures
        log_fields(
            log,
            wanted.end_level,
            _how_it_ended(record),
            **_chosen(record, _ENDED),
            **_chosen(measures, _MEASURED),
            **{f"{tier}_tokens": tokens for tier, tokens in measures.hit_tokens.items()},
        )

    return log_end


def _how_it_ended(record: DecisionRecord) -> str:
    if record.is_complete:
        return "round finished"
    return "round left by its client" if record.was_left else "round failed"


def _chosen(values: object, names: str) -> dict[str, Any]:
    return {name: getattr(values, name) for name in names.split()}
