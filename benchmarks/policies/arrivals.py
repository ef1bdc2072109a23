"""Arrivals as a real service saw them: the gaps of the Azure LLM inference trace 2023, at a wanted mean rate."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from workloads.trace import Session

POISSON = "poisson"
_FILE = Path(__file__).with_name("azure_arrivals.json")


def recorded_arrivals(kind: str, count: int, rate: float, seed: int) -> list[float]:
    """`count` arrival times in seconds, the first at 0, of mean rate `rate` and with the bursts of the trace.

    The seed chooses where in the trace they begin (it is a ring). Scaled by their own mean and not by the trace's, so
    that the rate is what was asked for. `kind`: `conversation` or `coding`.
    """
    gaps = _gaps()[kind]
    start = random.Random(f"{seed}/{kind}").randrange(len(gaps))
    chosen = [gaps[(start + number) % len(gaps)] for number in range(count - 1)]
    scale = (count - 1) / (rate * sum(chosen)) if chosen else 0.0
    arrivals = [0.0]
    for gap in chosen:
        arrivals.append(arrivals[-1] + gap * scale)
    return arrivals


def rearranged(sessions: Sequence[Session], kind: str, rate: float, seed: int) -> list[Session]:
    """The same sessions in the same order with other arrivals; `poisson`: as they are."""
    if kind == POISSON:
        return list(sessions)
    arrivals = recorded_arrivals(kind, len(sessions), rate, seed)
    return [
        session.model_copy(update={"arrival_s": arrival_s})
        for session, arrival_s in zip(sessions, arrivals, strict=True)
    ]


@cache
def _gaps() -> dict[str, list[float]]:
    return dict(json.loads(_FILE.read_text(encoding="utf-8"))["gaps_ms"])
