"""Where a round goes: the session's decode worker, the route of its prefill, and the one write that shares both."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from ampd.errors import UserError
from ampd.serving.placement import (
    ContextTooLongError,
    Moving,
    PlacementPolicies,
    Plan,
    PlanSituation,
    deterministic_choice,
    prefill_task,
    readable,
    with_room,
)
from ampd.state.known_worker import PUBLISH_INTERVAL_S
from ampd.state.redis_store import StateStore
from ampd.state.store import (
    Binding,
    FatalRequestError,
    ResentRequestError,
    RouteOutcome,
    RouteWrite,
    SessionLimits,
    StateSlowError,
    StateUnavailableError,
    TaskQueued,
    TooManySessionsError,
)
from ampd.state.view import ClusterView
from ampd.types import Moves, PrefillTask, WorkerView
from router.admission import AdmissionGate
from router.fingerprints import ForeignWorkers, may_continue
from router.round_errors import RoundOverloadedError, RoundRefusedError
from router.round_window import Counts
from router.unplaced_round import UnplacedRound
from router.worker_deaths import fatal


class WorkerLookups:
    """Looks workers up, once for all rounds that ask for the same one at the same time.

    A dead worker has thousands of sessions, and each snapshot holds the whole cluster. Rounds that ask for different
    workers share nothing, because a snapshot that began before a worker was published does not have it.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._running: dict[str, asyncio.Task[WorkerView | None]] = {}

    async def find(self, worker_id: str) -> WorkerView | None:
        """The worker's view in the shared state; None: it has none.

        Raises:
            StateUnavailableError: the shared state does not answer.
        """
        task = self._running.get(worker_id)
        if task is None:
            task = self._running[worker_id] = asyncio.create_task(self._look_up(worker_id))
            task.add_done_callback(lambda ended: self._ended(worker_id, ended))
        return await asyncio.shield(task)  # a round that ends must not end the look-up of the others

    async def _look_up(self, worker_id: str) -> WorkerView | None:
        return next((view for view in await self._store.snapshot() if view.worker_id == worker_id), None)

    def _ended(self, worker_id: str, task: asyncio.Task[WorkerView | None]) -> None:
        del self._running[worker_id]
        with suppress(asyncio.CancelledError):
            task.exception()  # all rounds that wait for it may have ended


log = logging.getLogger(__name__)

_CONFLICTS = 16
_COUNTED_S = 0.3
"""In which a coordinator has counted the death of a worker."""
_BEHIND_S = PUBLISH_INTERVAL_S
"""By then the worker has published the round itself."""
_STORE_RETRY_S = 10.0
"""Rounds call a lost store again after this time even if no heartbeat has been answered."""

_SESSION_RETRY_S = 30.0
"""Retry-After for a session beyond the limit of sessions."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a round goes.

    Attributes:
        is_shared: the store has the decision. Otherwise the store is lost and this replica decided alone: its own view
            has the task, and only this replica takes it out.
        is_new_session: the session was not bound before, as far as is known.
    """

    binding: Binding
    plan: Plan
    is_shared: bool
    is_new_session: bool = False


class Placer:
    """Binds sessions and routes rounds, from the local view and with one write per round.

    Args:
        spawn: runs a write in the background.
        counts: gets the sessions that this replica has `bound`, and `moved` because their worker was lost.
        moves: which sessions may move while their owner lives.
        rebound: takes the binding that holds, if it is another one and the round was placed already.

    Attributes:
        moves_made: moves that this replica made, by reason.
    """

    def __init__(
        self,
        view: ClusterView,
        store: StateStore,
        policies: PlacementPolicies,
        limits: SessionLimits,
        suspect_s: float,
        gate: AdmissionGate,
        spawn: Callable[[Coroutine[Any, Any, object]], None],
        counts: Counts,
        moves: Moves = "never",
        rebound: Callable[[Binding], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._store = store
        self._lookups = WorkerLookups(store)
        self._counts = counts
        self._policies = policies
        self._limits = limits
        self._suspect_s = suspect_s
        self._gate = gate
        self._spawn = spawn
        self._moves = moves
        self.moves_made = Counter[str]()
        self._rebound = rebound
        self._clock = clock
        self._gone_until_s: dict[str, float] = {}
        self._foreign = ForeignWorkers(view.knows)
        self._store_retry_s = float("-inf")
        self._is_alone = False
        self._behind: dict[str, RouteWrite] = {}
        self._name = uuid4().hex

    def suspect(self, worker_id: str) -> None:
        """A call to this worker failed: leave it out until it publishes again."""
        self._view.suspect(worker_id, self._suspect_s)
        self._expect_no_more(worker_id)

    def ended(self, session_id: str) -> None:
        """A session was ended: a write that still waits must not bind it again."""
        self._behind.pop(session_id, None)

    def store_answered(self) -> None:
        """This coordinator's heartbeat was written: rounds use the store again if they had lost it."""
        self._store_retry_s = float("-inf")

    async def place(self, run: UnplacedRound) -> Placement:
        """Decide and write. If another replica was faster, decide again.

        Raises:
            RoundRefusedError: 429 because of load or of too many sessions, 503 without a live decode worker that may
                continue the round, 500 if workers died under the prompt, 400 if it does not fit.
        """
        known, is_admitted, move_reason = run.binding, run.is_admitted, ""
        for _ in range(_CONFLICTS):
            decode = await self._bound(run, known) if known else None
            if decode is None or not may_continue(run.request.continued_mark, decode):
                decode = self._bind(run, known)
                if known is not None:
                    known = await self._rebind(known, decode.worker_id)
                    if known.worker_id != decode.worker_id:
                        continue
            _with_room(run, [decode])
            plan = await self._plan(run, known, decode)
            if not is_admitted:
                prefill = self._view.worker(plan.decision.worker_id) or plan.decode
                self._gate.check(run, plan.decode, prefill, self._clock())
                is_admitted = True
            if known is not None and plan.move_reason:
                # Planned again: another replica may have moved the session there before, with a longer history.
                run.may_move, run.holder = False, known.worker_id
                known = await self._move(known, plan)
                move_reason = plan.move_reason if known.worker_id == plan.decode.worker_id else ""
                continue
            if move_reason:
                plan = await self._moved(run, plan, move_reason)
            was_alone = not self._store_answers()
            if known is not None and not was_alone and _stays(run, known, plan):
                self._view.apply(TaskQueued(plan.decision.worker_id, plan.task))
                self._refresh(self._written(run, known, plan, None))
                return self._placed(Placement(known, plan, True))
            outcome = await self._write(run, known, plan)
            if outcome is None:
                if known is None and not was_alone and not self._store_answers():
                    continue  # bind again, as the other replicas do without the store
                # Nobody else can enter it here, and what waits must keep others out.
                self._view.apply(TaskQueued(plan.decision.worker_id, plan.task))
                alone = known or Binding(run.session_id, decode.worker_id, 0)
                return self._placed(Placement(alone, plan, False, _is_new(run, known, decode)))
            if outcome.accepted:
                self._view.apply(TaskQueued(plan.decision.worker_id, plan.task))
                is_new = _is_new(run, known, decode)
                return self._placed(Placement(outcome.binding, plan, True, is_new))
            if known is not None:
                # Another replica has moved the session since it was served here, so it rests where it is. Its old owner
                # still has what that move has not brought.
                run.may_move, run.holder = False, run.holder or known.worker_id
            known, move_reason = outcome.binding, ""
        raise RoundRefusedError(503, f"session {run.session_id!r} is being moved between workers; try again")

    def _placed(self, placement: Placement) -> Placement:
        if placement.is_new_session:
            self._counts.add("bound")
        if reason := placement.plan.move_reason:
            self.moves_made[reason] += 1
        return placement

    # -- the decode worker

    async def _bound(self, run: UnplacedRound, known: Binding) -> WorkerView | None:
        """The bound worker if it can be used; None if the session must move."""
        if known.worker_id in run.avoided:
            return None
        if found := self._view.worker(known.worker_id):
            return found
        if self._gone_until_s.get(known.worker_id, 0.0) > self._clock() or not self._store_answers():
            return None
        # It may be so new that its first view is still on the way to this replica.
        try:
            found = await self._lookups.find(known.worker_id)
        except StateSlowError as error:
            log.warning("%s; a session moves because its worker is not known here", error)
            return None
        except StateUnavailableError as error:
            self._lost_store(error)
            return None
        if found is None or not self._view.serves(found):
            self._expect_no_more(known.worker_id)
            return None
        return found

    def _expect_no_more(self, worker_id: str) -> None:
        """Do not ask the store for this worker for a while."""
        now_s = self._clock()
        self._gone_until_s = {gone: until_s for gone, until_s in self._gone_until_s.items() if until_s > now_s}
        self._gone_until_s[worker_id] = now_s + self._suspect_s

    def _bind(self, run: UnplacedRound, known: Binding | None) -> WorkerView:
        decode = self._view.decode()
        self._foreign.note_decode(decode)
        live = [view for view in decode if view.worker_id not in run.avoided]
        if decode and not live:
            raise RoundRefusedError(503, "every decode worker has failed or refused this round; send it again later")
        if not live:
            raise RoundRefusedError(503, "no live decode worker; try again when one has started")
        able = [view for view in live if may_continue(run.request.continued_mark, view)]
        if not able:
            # One answer must not come from two models, or from two tokenizers.
            raise RoundRefusedError(
                503,
                "the decode worker was lost in the middle of the output, and all others have other weights or "
                "settings; send the request again",
            )
        roomy = _with_room(run, able)
        held = {view.worker_id: view.held_tokens.get(run.session_id, 0) for view in roomy if known is None}
        if any(held.values()):
            # Another replica served the session, and the store may be away or may have lost the binding.
            return max(roomy, key=lambda view: (held[view.worker_id], view.worker_id))
        if not self._store_answers():
            return deterministic_choice(run.session_id, roomy)
        chosen = self._policies.bind(_task(run, 0), roomy, self._clock(), run.history.shared(roomy))
        return next(view for view in roomy if view.worker_id == chosen)

    async def _rebind(self, known: Binding, worker_id: str) -> Binding:
        moved = Binding(known.session_id, worker_id, known.epoch + 1)
        if not self._store_answers():
            self._counts.add("moved")
            return moved
        outcome = await self._write_rebind(known, worker_id, "a session moves without it")
        if outcome is None or outcome.accepted:
            self._counts.add("moved")
        return outcome.binding if outcome else moved

    async def _move(self, known: Binding, plan: Plan) -> Binding:
        """Move a session to the owner that a plan names; returns the binding that holds. Without the store it stays."""
        outcome = await self._write_rebind(known, plan.decode.worker_id, "a session stays")
        return outcome.binding if outcome else known

    async def _write_rebind(self, known: Binding, worker_id: str, otherwise: str) -> RouteOutcome | None:
        """The store's answer; None if it gives none in time. `otherwise`: what happens then, for the log."""
        try:
            return await self._store.rebind(known, worker_id, self._limits.ttl_s)
        except StateSlowError as error:
            log.warning("%s; %s", error, otherwise)
        except StateUnavailableError as error:
            self._lost_store(error)
        return None

    async def _moved(self, run: UnplacedRound, plan: Plan, reason: str) -> Plan:
        """The plan of a session that has moved; without the reason if another replica had moved it there before."""
        before = self._before(run, plan.decode)
        if before is not None and await run.history.held_by(plan.decode) > await run.history.held_by(before):
            return plan
        # The old owner may hold more than is known here. It is asked to drop its copy in any case.
        return replace(plan, move_reason=reason, holder=before)

    # -- the route

    async def _plan(self, run: UnplacedRound, known: Binding | None, decode: WorkerView) -> Plan:
        """The round's route at the owner of its session, or at a new owner if a move pays."""
        held_tokens, holder = await self._history(run, decode)
        prefill = self._view.prefill()
        self._foreign.note(decode, prefill)
        return self._policies.plan(
            PlanSituation(
                task=_task(run, held_tokens),
                decode=decode,
                prefill=prefill,
                now_s=self._clock(),
                shared_tokens=run.history.shared,
                lost=run.avoided,
                local_only=run.local_only,
                holder=holder,
                moving=self._moving(run) if known is not None and self._store_answers() else None,
            )
        )

    def _moving(self, run: UnplacedRound) -> Moving | None:
        """How the session of a round may move; None: it stays."""
        if self._moves == "never" or not run.may_move:
            return None
        return Moving(
            moves=self._moves,
            owners=self._view.decode,
            context_tokens=run.request.prompt_tokens + 1,
            moved_s=run.session.moved_s,
        )

    async def _history(self, run: UnplacedRound, decode: WorkerView) -> tuple[int, WorkerView | None]:
        """(tokens of the prompt with KV at their holder, the holder if it is not the decode worker)."""
        held_tokens = await run.history.held_by(decode)
        holder = self._before(run, decode)
        if holder is None or (there_tokens := await run.history.held_by(holder)) <= held_tokens:
            return held_tokens, None
        return there_tokens, holder

    def _before(self, run: UnplacedRound, decode: WorkerView) -> WorkerView | None:
        """The owner that the session has left, if the decode worker can read its KV."""
        before = run.holder
        if before is None or before == decode.worker_id or before in run.avoided:
            return None
        holder = self._view.worker(before)
        return holder if holder is not None and readable(decode, [holder]) else None

    # -- the write

    async def _write(self, run: UnplacedRound, known: Binding | None, plan: Plan) -> RouteOutcome | None:
        """The store's answer; None if the store is lost."""
        if not self._store_answers():
            return None
        write = self._written(run, known, plan, plan.task)
        try:
            outcome = await self._route(write)
        except asyncio.CancelledError:
            self._spawn(self._undone(write, plan.task.task_id))
            raise
        except TooManySessionsError as error:
            raise RoundOverloadedError(f"{error}; end sessions, or try again later", _SESSION_RETRY_S) from None
        except FatalRequestError as error:
            raise fatal(error.deaths) from None
        except StateSlowError as error:
            # Only this call: others may still be answered in time, so they are made.
            log.warning("%s; a round goes on without it", error)
            return None
        except StateUnavailableError as error:
            self._lost_store(error)
            return None
        if self._is_alone:
            self._is_alone = False
            log.warning("shared state answers again: bindings are shared with the other coordinators")
        return outcome

    def _written(self, run: UnplacedRound, known: Binding | None, plan: Plan, task: PrefillTask | None) -> RouteWrite:
        return RouteWrite(
            run.session_id,
            plan.decode.worker_id,
            known.epoch if known else 0,
            plan.decision.worker_id,
            task,
            run.request.tenant,
            ends_session=run.request.ends_session,
            prompt_digest=run.deaths.prompt_digest if task else "",  # the refusal of what was given comes too late
            request_id=run.request_id,
            asker=self._name if run.request_id else "",
        )

    async def _route(self, write: RouteWrite) -> RouteOutcome:
        """Write; after a while if the request was at another coordinator, which counts the death of its worker."""
        try:
            return await self._store.route(write, self._limits)
        except ResentRequestError:
            await asyncio.sleep(_COUNTED_S)
            return await self._store.route(write, self._limits)

    async def _undone(self, write: RouteWrite, task_id: str) -> None:
        """Undo a write whose client left meanwhile, because the shared state may have it already."""
        with suppress(StateUnavailableError):
            await self._store.finish_tasks(write.queue_worker_id, [task_id])
            if write.ends_session:
                await self._store.end_session(write.session_id, write.tenant)

    def _refresh(self, write: RouteWrite) -> None:
        """Write what no round waits for, soon and together with others."""
        if not self._behind:
            asyncio.get_running_loop().call_later(_BEHIND_S, self._write_behind)
        self._behind[write.session_id] = write

    def _write_behind(self) -> None:
        writes, self._behind = self._behind, {}
        self._spawn(self._refreshed(writes))

    async def _refreshed(self, writes: Mapping[str, RouteWrite]) -> None:
        try:
            for binding in await self._store.refresh(list(writes.values()), self._limits):
                self._rebound(binding)
                if writes[binding.session_id].ends_session:  # its worker ends no binding of another one
                    await self._store.end_session(binding.session_id)
        except StateSlowError as error:
            log.warning("%s; %d rounds go on without it", error, len(writes))
        except StateUnavailableError as error:
            self._lost_store(error)

    def _store_answers(self) -> bool:
        """False after a failure until a heartbeat is answered, because otherwise rounds would wait for the timeout."""
        return self._clock() >= self._store_retry_s

    def _lost_store(self, error: Exception) -> None:
        self._store_retry_s = self._clock() + _STORE_RETRY_S
        if not self._is_alone:
            self._is_alone = True
            log.warning("%s; going on with the last view, new sessions are bound by their name's hash", error)


def _stays(run: UnplacedRound, known: Binding, plan: Plan) -> bool:
    """Whether the owner of the session, which still holds its KV, prefills the round itself, as it did the last one.

    It is the next to know of the round, and tells all others when it publishes. So the round waits for no write, and
    the write enters no task. If workers died under the prompt, the session's last round was not completed.
    """
    is_local = known.worker_id == plan.decode.worker_id == plan.decision.worker_id
    return (
        is_local
        and known is run.binding
        and run.session.is_settled
        and plan.decode.held_tokens.get(run.session_id, 0) > 0
    )


def _is_new(run: UnplacedRound, known: Binding | None, decode: WorkerView) -> bool:
    """A session that another replica bound to the same worker is not known here, but that worker holds some of it."""
    return known is None and not decode.held_tokens.get(run.session_id)


def _task(run: UnplacedRound, held_tokens: int) -> PrefillTask:
    return prefill_task(
        uuid4().hex,
        run.session_id,
        run.request.prompt_tokens,
        held_tokens,
        arrival_s=run.arrival_s,
        slo=run.request.slo,
        session_missed=run.session.has_missed,
        has_output=run.request.has_output,
    )


def _with_room(run: UnplacedRound, workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """The workers with room for the prompt and a token of output. Refuses the round if there are none."""
    try:
        return with_room(run.request.prompt_tokens + 1, workers)
    except ContextTooLongError as error:
        raise RoundRefusedError(
            400,
            # Agents look for these two names of the error, and shorten their context then.
            f"prompt is too long: {run.request.prompt_tokens} tokens; the maximum context length is "
            f"{error.limit_tokens} tokens (prompt and output together); send a shorter prompt",
        ) from None


def log_left_out(error: UserError) -> None:
    """Log that routing or binding leaves workers out. The line names the fix."""
    log.error("leaving out workers: %s", error)
