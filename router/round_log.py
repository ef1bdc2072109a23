"""The log lines of a round in the coordinator: its placement and its end."""

from __future__ import annotations

import logging

from ampd.telemetry.logs import RoundLog, log_fields
from ampd.wire import fields_of
from router.decision_record import DecisionRecord
from router.served import Observer, ServedRound

log = logging.getLogger(__name__)


def log_placed(wanted: RoundLog, record: DecisionRecord) -> None:
    """Log a decision and its estimates. A round whose worker is lost is placed, and logged, again."""
    facts = record.facts
    log_fields(
        log,
        wanted.step_level,
        "round placed",
        **fields_of(record.decided),
        rewritten=record.rewritten,
        policy=facts.policy,
        ttft_target_s=facts.ttft_target_s,
        itl_target_s=facts.itl_target_s,
        clamped_targets=facts.clamped_targets,
        retries=record.retries,
        session_key=facts.session_key,
    )


def end_logger(wanted: RoundLog) -> Observer:
    """An observer that logs one line at the end of each round."""

    def log_end(served: ServedRound) -> None:
        record, decided, measures = served.record, served.record.decided, served.record.measures
        log_fields(
            log,
            wanted.end_level,
            _how_it_ended(served),
            outcome=served.outcome,
            route=decided.route,
            reason=decided.reason,
            decode_worker=decided.decode_worker,
            prefill_worker=decided.prefill_worker,
            is_initial=served.is_initial,
            hist_tokens=decided.hist_tokens,
            incr_tokens=decided.incr_tokens,
            cached_tokens=measures.cached_tokens,
            **{f"{tier}_tokens": tokens for tier, tokens in measures.hit_tokens.items()},
            output_tokens=served.output_tokens,
            ttft_s=served.ttft_s,
            itl_s=served.itl_s,
            lasted_s=served.lasted_s,
            queued_s=measures.queued_s,
            prefill_s=measures.prefill_s,
            kv_read_bytes_history=measures.kv_read_bytes_history,
            kv_read_s_history=measures.kv_read_s_history,
            kv_read_bytes_increment=measures.kv_read_bytes_increment,
            kv_read_s_increment=measures.kv_read_s_increment,
            kv_reload_s=measures.kv_reload_s,
            retries=record.retries,
            session_key=record.facts.session_key,
        )

    return log_end


def _how_it_ended(served: ServedRound) -> str:
    if served.is_complete:
        return "round finished"
    return "round left by its client" if served.was_left else "round failed"
