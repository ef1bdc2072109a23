"""Sessions that are under way when a simulation begins: their KV lies on the workers that own them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.simulator.options import UnderWay
from planner.simulator.rounds import ActiveSession
from planner.simulator.worker import SimulatedWorker


class WarmStart:
    """Binds sessions that are under way to their owners.

    Those of no known owner go to the workers that own the least KV, in the order of their first rounds.
    """

    def __init__(self, under_way: Mapping[str, UnderWay], workers: Sequence[SimulatedWorker]) -> None:
        self._under_way = under_way
        self._workers = {worker.worker_id: worker for worker in workers}
        self._given_tokens = {worker.worker_id: 0 for worker in workers if worker.role.owns_sessions}
        for begun in under_way.values():
            if begun.owner in self._given_tokens:
                self._given_tokens[begun.owner] += begun.context_tokens

    def place(self, session: ActiveSession) -> None:
        """Bind a session that is under way. The worker holds its KV, as far as there is room."""
        begun = self._under_way.get(session.session_id)
        if begun is None:
            return
        session.begun = begun
        owner, tokens = begun.owner, begun.context_tokens
        if not owner and not tokens:
            return
        if not owner:
            owner = min(self._given_tokens, key=lambda each: self._given_tokens[each])
            self._given_tokens[owner] += tokens
        worker = self._workers[owner]
        if tokens and worker.memory.reserve(session.session_id, tokens):
            worker.memory.settle(session.session_id, tokens)
        session.context_tokens = tokens
        session.decode = worker
        session.users.add(worker)
