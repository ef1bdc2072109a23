"""Why rounds failed, by the coordinators' logs, which have the reason of each round that they refused."""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.faults.load import Ending, RoundResult

_REFUSED = "round refused"
NOT_REFUSED = "no coordinator refused it"
"""The reason of a round whose coordinator or frontend ended, or that a frontend sent to none."""

_MARGIN_S = 0.5
"""A coordinator logs a refusal before its client has it, on the same clock."""
_OF_ONE_ROUND = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{16,}\b")
_NUMBER = re.compile(r"\b\d+(?:\.\d+)?\b")
_MOST_CHARS = 160


@dataclass(frozen=True, slots=True)
class Refusal:
    """A coordinator's log line about a round that it refused; `at_s` is on the clock of `time.time`."""

    at_s: float
    reason: str


Failures = dict[str, Counter[str]]
"""Cause -> events of the soak that were the latest ones when a round failed by it -> number of rounds."""


def failures_of(
    results: Iterable[RoundResult], refusals: Mapping[str, Sequence[Refusal]], events: Sequence[tuple[float, str]]
) -> Failures:
    """Sort the rounds that failed clearly by cause: what the client got, and why the coordinator refused it.

    Args:
        refusals: of `read_refusals`.
        events: begin of each event on the clock of `time.monotonic`, and its name, in the order of time.
    """
    found: Failures = defaultdict(Counter)
    wall_s = time.time() - time.monotonic()
    for result in results:
        if result.ending is Ending.FAILED:
            from_s, to_s = result.started_s + wall_s - _MARGIN_S, result.ended_s + wall_s + _MARGIN_S
            reasons = [each.reason for each in refusals.get(result.session_id, ()) if from_s <= each.at_s <= to_s]
            cause = f"{plain(result.detail)} ({plain(reasons[-1]) if reasons else NOT_REFUSED})"
            begun = [name for at_s, name in events if at_s <= result.ended_s]
            found[cause][begun[-1] if begun else "no event"] += 1
    return found


def lines(failures: Failures) -> list[str]:
    """A line per cause, the most frequent one first."""
    ordered = sorted(failures.items(), key=lambda item: -item[1].total())
    return [
        f"Failed {events.total()} times: {cause}. Latest events: "
        + ", ".join(f"{name} {count}" for name, count in events.most_common())
        for cause, events in ordered
    ]


def read_refusals(logs: Iterable[Path]) -> dict[str, list[Refusal]]:
    """Session -> the refusals of its rounds in the coordinators' logs, also in those of coordinators that ended."""
    found: dict[str, list[Refusal]] = defaultdict(list)
    for log in logs:
        for text in log.read_text("utf-8", errors="replace").splitlines():
            if _REFUSED in text and (line := _object(text)).get("session_id"):
                at_s = datetime.fromisoformat(line["time"]).timestamp()
                found[line["session_id"]].append(Refusal(at_s, f"{line['status']}: {line['error']}"))
    for refusals in found.values():
        refusals.sort(key=lambda each: each.at_s)
    return found


def plain(text: str) -> str:
    """A message without the ids and numbers of one round; its status stays."""
    head, colon, rest = text.partition(": ")
    status, text = (head + colon, rest) if head.isdigit() else ("", text)
    return status + _NUMBER.sub("N", _OF_ONE_ROUND.sub("ID", " ".join(text.split())))[:_MOST_CHARS]


def _object(text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}
