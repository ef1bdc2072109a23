"""The rounds of a replay that missed their targets: which, when, by how much, and why, if the server reports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampd.types import Slo
from workloads.results import RoundRecord, meets

_SMALL = 0.1
"""A part of a TTFT below this share is not named as its cause."""


@dataclass(frozen=True, slots=True)
class MissedRound:
    """One round that failed or missed a target.

    Attributes:
        at_s: when it was clear: the late first token, the last token, or the sending of a round that failed; from the
            start of the run.
        targets: those that it missed, each with the value.
        causes: the parts of its time, from its decision record; empty if there is none.
    """

    session_id: str
    index: int
    sent_s: float
    at_s: float
    targets: str
    causes: str


def missed_rounds(records: Sequence[RoundRecord], slo: Slo) -> list[MissedRound]:
    """The missed rounds in the order in which they were sent."""
    missed = [record for record in records if not meets(record, slo)]
    return [_missed(record, slo) for record in sorted(missed, key=lambda record: record.sent_s)]


def _missed(record: RoundRecord, slo: Slo) -> MissedRound:
    at_s, targets, causes = record.sent_s, [], _causes(record.decision)
    if record.error is not None or record.ttft_s is None:
        failure = f"failed: {record.error or 'no token'}"
        return MissedRound(record.session_id, record.index, at_s, at_s, failure, causes)
    if record.itl_s is not None and not slo.itl_met(record.itl_s):
        targets.append(f"ITL {record.itl_s * 1e3:,.1f} ms of {slo.itl_s * 1e3:g} ms")
        at_s = record.sent_s + (record.e2e_s or record.ttft_s)
    if not slo.ttft_met(record.ttft_s):
        targets.insert(0, f"TTFT {record.ttft_s * 1e3:,.0f} ms of {slo.ttft_s * 1e3:g} ms")
        at_s = record.sent_s + record.ttft_s
    return MissedRound(record.session_id, record.index, record.sent_s, at_s, ", ".join(targets), causes)


def _causes(decision: Mapping[str, Any]) -> str:
    """The route with its reason, and the parts of the TTFT that took a good share of it, longest first."""
    if not decision.get("route"):
        return ""
    tokens = f"{_number(decision.get('incr_tokens')):,.0f} tokens"
    parts = [
        ("queued", _seconds(decision, "queued_s")),
        (f"prefill of {tokens}", _seconds(decision, "prefill_s")),
        ("KV reads", _seconds(decision, "kv_read_s_history") + _seconds(decision, "kv_read_s_increment")),
        ("KV reload", _seconds(decision, "kv_reload_s")),
    ]
    whole_s = max(_seconds(decision, "ttft_s"), sum(seconds for _, seconds in parts))
    causes = [f"{name} {seconds * 1e3:,.0f} ms" for name, seconds in _largest(parts) if seconds > _SMALL * whole_s]
    hits = decision.get("hit_tokens")
    if recomputed := _number(hits.get("recomputed") if isinstance(hits, Mapping) else None):
        causes.append(f"{recomputed:,.0f} tokens of the history recomputed")
    if retries := _number(decision.get("retries")):
        causes.append(f"{retries:.0f} workers lost")
    return "; ".join([f"{decision['route']} ({decision.get('reason') or '-'})", *causes])


def _largest(parts: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(parts, key=lambda part: -part[1])


def _seconds(decision: Mapping[str, Any], name: str) -> float:
    return _number(decision.get(name))


def _number(value: object) -> float:
    """A value of a foreign server's report; 0 if it is none."""
    return float(value) if isinstance(value, int | float) else 0.0
