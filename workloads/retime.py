"""New arrivals for a trace: a Poisson process of a given rate."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ampd.errors import UserError
from workloads.trace import Session


def retime(sessions: Sequence[Session], rate: float | None, seed: int, limit: int | None) -> list[Session]:
    """Replace the arrivals by a Poisson process of `rate` sessions per second, and take `limit` sessions.

    With a rate, the sessions are repeated under new names until the limit is reached. Without a rate the trace's own
    arrivals stay, shifted so that the first session arrives at 0, and the limit only cuts. The same seed gives the
    same arrivals.

    Raises:
        UserError: a rate or limit that is not positive.
    """
    if rate is not None and not 0 < rate < float("inf"):
        raise UserError(f"--rate must be a positive number of sessions per second (given: {rate})")
    if limit is not None and limit < 1:
        raise UserError(f"--limit must be at least 1 (given: {limit})")
    if not sessions:
        return []
    if rate is None:
        return _shifted(sorted(sessions, key=lambda session: session.arrival_s)[:limit])
    wanted = len(sessions) if limit is None else limit
    arrivals = poisson_arrivals(wanted, rate, random.Random(seed))
    return [_repeated(sessions, index, arrival_s) for index, arrival_s in enumerate(arrivals)]


def poisson_arrivals(count: int, rate: float, rng: random.Random) -> list[float]:
    """`count` arrival times in seconds, the first at 0, with exponential gaps of mean 1 / `rate`."""
    arrivals: list[float] = []
    now_s = 0.0
    for _ in range(count):
        arrivals.append(now_s)
        now_s += rng.expovariate(rate)
    return arrivals


def _shifted(sessions: Sequence[Session]) -> list[Session]:
    start_s = sessions[0].arrival_s
    return [session.model_copy(update={"arrival_s": session.arrival_s - start_s}) for session in sessions]


def _repeated(sessions: Sequence[Session], index: int, arrival_s: float) -> Session:
    lap, position = divmod(index, len(sessions))
    session = sessions[position]
    name = session.session_id if lap == 0 else f"{session.session_id}#{lap + 1}"
    return session.model_copy(update={"session_id": name, "arrival_s": arrival_s})
