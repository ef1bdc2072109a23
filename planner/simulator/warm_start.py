"""Sessions that are under way when a simulation begins: their KV lies on the workers that own them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.simulator.rounds import ActiveSession
from planner.simulator.worker import SimulatedWorker


class WarmStart:
    """Binds sessions with a context to the workers that own the least KV, in the order of their first rounds.

    Args:
        contexts: session id -> tokens of its context before its first round.
        owners: the workers that own sessions.
    """

    def __init__(self, contexts: Mapping[str, int], owners: Sequence[SimulatedWorker]) -> None:
        self._contexts = contexts
        self._given_tokens = dict.fromkeys(owners, 0)

    def place(self, session: ActiveSession) -> None:
        """Bind a session that is under way. The worker holds its KV, as far as there is room."""
        tokens = self._contexts.get(session.session_id, 0)
        if not tokens:
            return
        worker = min(self._given_tokens, key=lambda each: self._given_tokens[each])
        self._given_tokens[worker] += tokens
        if worker.memory.reserve(session.session_id, tokens):
            worker.memory.settle(session.session_id, tokens)
        session.context_tokens = tokens
        session.decode = worker
        session.users.add(worker)
