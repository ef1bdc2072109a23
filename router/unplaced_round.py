"""A round before its placement, as the placer, the admission and the moves of sessions see it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ampd.state.store import Binding
from ampd.types import Slo, WorkerView


@dataclass(frozen=True, slots=True)
class MovingSession:
    """What a round knows of the moves of its session.

    Attributes:
        may_move: the session may move with this round.
        moved_s: when it moved last, as far as this replica knows; minus infinity: never.
        holder: the owner before, if the session moved and no round has been completed since; it has the history.
    """

    may_move: bool = False
    moved_s: float = float("-inf")
    holder: str | None = None


STAYS = MovingSession()


@dataclass(frozen=True, slots=True)
class UnplacedRound:
    """A round that has to be placed.

    Attributes:
        prompt_tokens: length of the prompt.
        hist_tokens: returns how much of the prompt's KV a decode worker has of the session; called when that worker is
            known.
        local_only: why the prefill must be local, if it must.
        binding: the binding that this replica knows; it may be out of date.
        is_settled: the session's last round was served here, and was completed.
        rebound: takes the binding that holds, if it is another one and the round was placed already.
        arrival_s: as in its task (`PrefillTask`).
        has_output: the client has some of the round's output.
        lost: workers that failed this round already, or refused it.
        fingerprint_mark: of the weights that the round's output so far came from; 0: any worker may continue it.
        session_missed: an earlier round of the session missed a target.
        is_admitted: the round was placed before, and a worker failed it.
        ends_session: nothing of the session is needed after the round.
        prompt_digest: see `RequestDeaths`.
        request_id: of the client's request.
        moving: whether the session may move to another owner.
        shared_tokens: returns what workers hold of the prompt for other sessions, by worker id.
    """

    session_id: str
    tenant: str
    prompt_tokens: int
    slo: Slo
    arrival_s: float
    hist_tokens: Callable[[WorkerView], Awaitable[int]]
    local_only: str | None
    binding: Binding | None
    lost: Collection[str] = ()
    fingerprint_mark: int = 0
    session_missed: bool = False
    has_output: bool = False
    is_admitted: bool = False
    ends_session: bool = False
    prompt_digest: str = ""
    request_id: str = ""
    is_settled: bool = False
    rebound: Callable[[Binding], None] = lambda _: None
    moving: MovingSession = STAYS
    shared_tokens: Callable[[Sequence[WorkerView]], Mapping[str, int]] = lambda _: {}
