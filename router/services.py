"""What all rounds of a coordinator share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ampd.telemetry.logs import RoundLog
from router.decision_record import Observer
from router.placement import Placer
from router.round_ends import RoundEnds
from router.session_branches import SessionBranches
from router.session_memory import SessionMemory
from router.unplaced_round import KnownPrefixes
from router.worker_access import WorkerAccess
from router.worker_deaths import WorkerDeaths


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a coordinator that its rounds use.

    Attributes:
        policy: name of the routing policy, for the decision record.
        retries: lost workers that a round survives.
        page_size_tokens: tokens per KV page of the workers.
        spawn: starts work that outlives the round.
        deaths: the workers that died under rounds.
        ends: the rounds that workers have.
        refused: called with the status and the message of a round that its worker has refused.
        observers: called with each round at its end.
        round_log: which log lines are written for rounds that go well.
        prefixes: the prefixes that sessions share.
    """

    placer: Placer
    access: WorkerAccess
    sessions: SessionMemory
    branches: SessionBranches
    policy: str
    retries: int
    page_size_tokens: int
    clock: Callable[[], float]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    deaths: WorkerDeaths
    ends: RoundEnds[Any]
    refused: Callable[[int, str], None] = lambda _status, _message: None
    observers: tuple[Observer, ...] = ()
    round_log: RoundLog = RoundLog.END
    prefixes: KnownPrefixes = field(default_factory=KnownPrefixes)

    async def end_session(self, session_id: str, tenant: str, used: set[str]) -> None:
        """End a session with its branches everywhere: in this replica's memory, in the shared state and on the workers.

        Args:
            used: workers that served the session's last round.
        """
        keys = self.branches.of(session_id)
        self.branches.forget(session_id)
        await asyncio.gather(
            *(self.access.end_session(key, tenant, used if key == session_id else set()) for key in keys)
        )
