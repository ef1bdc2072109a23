"""The coordinators of a simulation: each round is refused, or bound, routed and entered in a worker's queue.

The pools policy is asked at intervals, and its changes of roles take effect at once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf

from ampd.policies.estimates import is_within
from ampd.serving.admission import Admission, AdmissionSituation, Refusal, is_in_progress
from ampd.serving.placement import (
    ContextTooLongError,
    Moving,
    PlacementPolicies,
    Plan,
    PlanSituation,
    prefill_task,
    with_room,
)
from ampd.serving.roles import DueChange, RoleReview, due_changes
from ampd.serving.shared_prefixes import shared_tokens, with_shared
from ampd.types import PrefillTask, WorkerView
from planner.simulator.options import World
from planner.simulator.outcome import SimulatedRound
from planner.simulator.rounds import Rounds
from planner.simulator.sessions import ActiveRound, ActiveSession
from planner.simulator.worker import SimulatedWorker, Views
from workloads.trace import kept_tokens


class _Refused(Exception):  # noqa: N818
    """No worker can serve a round. The text is the round's error."""

    def __init__(self, context_tokens: int, limit: str, limit_tokens: int) -> None:
        super().__init__(f"prompt and output have {context_tokens} tokens, {limit} {limit_tokens} tokens")


class Coordinators:
    """Places rounds. Each round meets a random one of the replicas.

    Args:
        max_context_tokens: longest context of the model; 0: unlimited.
        refused: called for a round that no worker can serve; its record has the error.

    Attributes:
        refusals: rounds that were sent back because of load, once per attempt.
        moves: how often a session moved to another owner, by reason.
    """

    def __init__(
        self,
        world: World,
        workers: Sequence[SimulatedWorker],
        views: Views,
        max_context_tokens: int,
        rounds: Rounds,
        refused: Callable[[ActiveSession, SimulatedRound], None],
    ) -> None:
        self._loop = world.loop
        self._options = world.options
        self._slo = world.slo
        self._workers = {worker.worker_id: worker for worker in workers}
        self._views = views
        self._max_context_tokens = max_context_tokens
        self._rounds = rounds
        self._refused = refused
        self._prefixes = world.prefixes
        self._rng = random.Random(f"{world.options.seed}/coordinators")
        self.refusals = 0
        self.moves = Counter[str]()
        self._admission: Admission | None = None
        if world.options.max_wait:
            spread = random.Random(f"{world.options.seed}/admission")
            self._admission = Admission(world.options.max_wait, 0, world.belief, world.slo, spread)
        self._policies = PlacementPolicies(world.policies.binding, world.policies.routing, world.belief, self._rng)

    def send(self, session: ActiveSession) -> None:
        """A round's request leaves its client."""
        sent_s = self._loop.now_s
        if self._options.dispatch_s:
            self._loop.at(sent_s + self._options.dispatch_s, self._place, (session, sent_s))
        else:
            self._place((session, sent_s))

    def _place(self, sent: tuple[ActiveSession, float]) -> None:
        session, sent_s = sent
        item = session.rounds[session.index]
        kept = kept_tokens(item, session.context_tokens)
        incr_tokens, output_tokens = item.incr_tokens, item.output_tokens
        record = SimulatedRound(session.session_id, session.index, sent_s, kept, incr_tokens, output_tokens)
        prompt_tokens = kept + incr_tokens
        try:
            roomy = self._roomy(session, prompt_tokens + output_tokens)
        except _Refused as refused:
            record.error = str(refused)
            self._refused(session, record)
            return
        coordinator = self._rng.randrange(self._options.coordinators) if self._options.coordinators > 1 else 0
        decode = session.decode or self._bind(session, prompt_tokens, roomy, coordinator)
        if kept < session.context_tokens:
            session.context_tokens = kept
            for worker in session.users:
                worker.memory.cut(session.session_id, kept)
            self._cut_prefix(session.session_id, kept)
        self._route(ActiveRound(session, record, decode), coordinator)

    def _cut_prefix(self, session_id: str, kept_tokens: int) -> None:
        """A context was rewritten: it shares no more than its beginning that was kept."""
        prefix = self._prefixes.get(session_id)
        if prefix is not None and kept_tokens < prefix.tokens:
            page = self._options.page_size_tokens
            self._prefixes[session_id] = prefix._replace(tokens=kept_tokens // page * page)

    def _shared(self, session_id: str, views: Sequence[WorkerView]) -> Mapping[str, int]:
        """What workers hold of a session's prompt for other sessions, by worker id."""
        prefix = self._prefixes.get(session_id)
        if prefix is None or not self._options.knows_prefixes:
            return {}
        return shared_tokens({prefix.key: prefix.tokens}, views)

    def _refusal(
        self, round_: ActiveRound, decode: WorkerView, prefill: SimulatedWorker, coordinator: int
    ) -> Refusal | None:
        if self._admission is None:
            return None
        return self._admission.refusal(
            AdmissionSituation(
                prompt_tokens=round_.prompt_tokens,
                is_running=is_in_progress(round_.session.session_id, (), is_bound=round_.session.decode is not None),
                decode=decode,
                prefill=self._views.worker(coordinator, prefill),
                rounds=0,
                now_s=self._loop.now_s,
            )
        )

    def _roomy(self, session: ActiveSession, context_tokens: int) -> Sequence[SimulatedWorker]:
        """The workers that can own a round's session. A bound session stays, even if another worker has more memory.

        Raises:
            _Refused: there are none.
        """
        if 0 < self._max_context_tokens < context_tokens:
            raise _Refused(context_tokens, "the longest context of the model is", self._max_context_tokens)
        owner = session.decode
        if owner is not None and is_within(context_tokens, owner.max_context_tokens):
            return [owner]
        workers = self._workers.values()
        able = [owner] if owner else [worker for worker in workers if worker.role.owns_sessions]
        try:
            return with_room(context_tokens, able)
        except ContextTooLongError as error:
            raise _Refused(context_tokens, "the KV memory of a decode worker holds", error.limit_tokens) from None

    def _bind(
        self, session: ActiveSession, prompt_tokens: int, roomy: Sequence[SimulatedWorker], coordinator: int
    ) -> SimulatedWorker:
        views = [self._views.worker(coordinator, worker) for worker in roomy]
        task, shared = self._task(session, prompt_tokens, 0), self._shared(session.session_id, views)
        return self._workers[self._policies.bind(task, views, self._loop.now_s, shared)]

    def _route(self, round_: ActiveRound, coordinator: int) -> None:
        plan = self._plan(round_, coordinator)
        prefill = self._workers[plan.decision.worker_id]
        if refusal := self._refusal(round_, plan.decode, prefill, coordinator):
            self.refusals += 1
            back_s = self._loop.now_s + refusal.retry_after_s
            self._loop.at(back_s, self._place, (round_.session, back_s))
            return
        round_.decode = self._workers[plan.decode.worker_id]
        self._enter(round_, plan, coordinator)
        if plan.move_reason:
            self.moves[plan.move_reason] += 1

    def _plan(self, round_: ActiveRound, coordinator: int) -> Plan:
        record, session, decode = round_.record, round_.session, round_.decode
        prefill = self._views.prefill(coordinator)
        view = self._views.worker(coordinator, decode)
        held_tokens = min(record.hist_tokens, decode.memory.resident.held.get(record.session_id, 0))
        task = self._task(session, round_.prompt_tokens, held_tokens)
        shared_tokens = partial(self._shared, record.session_id)
        here = with_shared(task, shared_tokens([view]).get(view.worker_id, 0))
        record.missing_tokens = max(record.hist_tokens - self._options.page_size_tokens - here.hist_tokens, 0)
        return self._policies.plan(
            PlanSituation(
                task=task,
                decode=view,
                prefill=prefill,
                now_s=self._loop.now_s,
                shared_tokens=shared_tokens,
                moving=self._moving(round_, coordinator),
            )
        )

    def _moving(self, round_: ActiveRound, coordinator: int) -> Moving | None:
        """How the session may move before a later round of it; None: it stays."""
        session = round_.session
        if session.decode is None or self._options.moves == "never":
            return None
        return Moving(
            moves=self._options.moves,
            owners=partial(self._views.decode, coordinator),
            context_tokens=round_.prompt_tokens + round_.record.output_tokens,
            moved_s=session.moved_s,
        )

    def _task(self, session: ActiveSession, prompt_tokens: int, held_tokens: int) -> PrefillTask:
        return prefill_task(
            f"{session.session_id}/{session.index}",
            session.session_id,
            prompt_tokens,
            held_tokens,
            arrival_s=self._loop.now_s,
            slo=self._slo,
            session_missed=session.has_missed,
        )

    def _enter(self, round_: ActiveRound, plan: Plan, coordinator: int) -> None:
        """Enter the prefill in its worker's queue."""
        record, decision = round_.record, plan.decision
        worker = round_.prefill = self._workers[decision.worker_id]
        record.route, record.reason = decision.route.value, decision.reason
        record.worker_id, record.decode_worker_id = worker.worker_id, round_.decode.worker_id
        if round_.moves:
            round_.session.moved_s = self._loop.now_s
            round_.decode.memory.resident.own(record.session_id)
            round_.holder.memory.resident.copy(record.session_id)
        round_.session.decode = round_.decode
        round_.session.users.add(worker)
        if worker is not round_.decode:
            round_.session.users.add(round_.decode)
            worker.memory.resident.copy(record.session_id)
        self._views.entered(coordinator, worker, plan.task)
        self._rounds.enter(round_, plan.task, fetches=plan.source is not None)


class RoleKeeper:
    """Changes the roles and labels of the workers.

    Args:
        is_over: whether all sessions have ended. The policy is not asked any more then.

    Attributes:
        role_flips: changes of a role, or from one label to another, so far. A worker's first label is not counted.
    """

    def __init__(
        self, world: World, workers: Sequence[SimulatedWorker], views: Views, is_over: Callable[[], bool]
    ) -> None:
        self.role_flips = 0
        self._loop = world.loop
        self._interval_s = world.options.pools_interval_s
        self._is_idle = world.policies.pools.is_idle
        self._review = RoleReview(
            world.policies.pools,
            world.belief,
            world.slo,
            random.Random(f"{world.options.seed}/pools"),
        )
        self._workers = {worker.worker_id: worker for worker in workers}
        self._views = views
        self._is_over = is_over
        self._changed_s = -inf

    def start(self) -> None:
        """Begin to ask. An idle policy is never asked, so that a run with static roles has no superfluous event."""
        if not self._is_idle:
            self._loop.at(self._loop.now_s, self._ask)

    def _ask(self, _: object) -> None:
        if self._is_over():
            return
        now_s = self._loop.now_s
        workers = self._views.workers(0)
        for due in due_changes(workers, self._review.wanted(workers, now_s, self._changed_s)).changes:
            self._apply(due)
        self._loop.at(now_s + self._interval_s, self._ask)

    def _apply(self, due: DueChange) -> None:
        change, before = due.change, due.before
        self._changed_s = self._loop.now_s
        self.role_flips += before.role is not change.role or bool(before.label)
        worker = self._workers[change.worker_id]
        worker.turn(change.role, change.label)
