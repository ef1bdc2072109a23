"""The coordinators of a simulation: each round is refused, or bound, routed and entered in a worker's queue."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ampd.policies.estimates import local
from ampd.serving.placement import PREFILL_WORKER_REFUSED, PlacementPolicies, exceeded_limit, fits, prefill_task
from ampd.types import PrefillTask, Role, Route, RouteDecision
from planner.simulator.outcome import SimulatedRound
from planner.simulator.prefills import Prefills
from planner.simulator.rounds import ActiveRound, ActiveSession
from planner.simulator.views import Views
from planner.simulator.worker import SimulatedWorker
from planner.simulator.world import World
from workloads.trace import kept_tokens


class Coordinators:
    """Places rounds. Each round meets a random one of the replicas.

    Args:
        max_context_tokens: longest context of the model; 0: unlimited.
        refused: called for a round that no worker can serve; its record has the error.
    """

    def __init__(
        self,
        world: World,
        workers: Sequence[SimulatedWorker],
        views: Views,
        max_context_tokens: int,
        prefills: Prefills,
        refused: Callable[[ActiveSession, SimulatedRound], None],
    ) -> None:
        self._loop = world.loop
        self._options = world.options
        self._slo = world.slo
        self._workers = {worker.worker_id: worker for worker in workers}
        self._views = views
        self._max_context_tokens = max_context_tokens
        self._prefills = prefills
        self._refused = refused
        self._rng = random.Random(f"{world.options.seed}/coordinators")
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
        record = SimulatedRound(session.session_id, session.index, sent_s, kept, item.incr_tokens, item.output_tokens)
        record.error = self._refusal(session, kept + item.incr_tokens + item.output_tokens)
        if record.error is not None:
            self._refused(session, record)
            return
        coordinator = self._rng.randrange(self._options.coordinators) if self._options.coordinators > 1 else 0
        decode = session.decode or self._bind(session, record, coordinator)
        if kept < session.context_tokens:
            session.context_tokens = kept
            for worker in session.users:
                worker.memory.cut(session.session_id, kept)
        self._route(ActiveRound(session, record, decode), coordinator)

    def _refusal(self, session: ActiveSession, tokens: int) -> str | None:
        """Why a round with this many tokens of prompt and output cannot be served; None if it can."""
        if not fits(tokens, self._max_context_tokens):
            limit, owner = self._max_context_tokens, "the longest context of the model is"
            return f"prompt and output have {tokens} tokens, {owner} {limit} tokens"
        # A session that is bound stays there, even if another worker has more memory.
        able = [session.decode] if session.decode else [w for w in self._workers.values() if w.role is Role.DECODE]
        exceeded = exceeded_limit(tokens, [worker.memory.capacity_tokens for worker in able])
        if exceeded is None:
            return None
        return f"prompt and output have {tokens} tokens, the KV memory of a decode worker holds {exceeded} tokens"

    def _bind(self, session: ActiveSession, record: SimulatedRound, coordinator: int) -> SimulatedWorker:
        prompt_tokens = record.hist_tokens + record.incr_tokens
        needed = prompt_tokens + record.output_tokens
        roomy = [view for view in self._views.decode(coordinator) if fits(needed, view.max_context_tokens)]
        chosen = self._policies.bind(self._task(session, prompt_tokens, 0), roomy, self._loop.now_s)
        session.decode = self._workers[chosen]
        session.users.add(session.decode)
        return session.decode

    def _route(self, round_: ActiveRound, coordinator: int) -> None:
        record, decode = round_.record, round_.decode
        held_tokens = decode.memory.held.get(record.session_id, 0)
        task = self._task(round_.session, round_.prompt_tokens, min(record.hist_tokens, held_tokens))
        record.missing_tokens = max(record.hist_tokens - self._options.page_size_tokens - task.hist_tokens, 0)
        prefill = self._views.prefill(coordinator)
        view = self._views.worker(coordinator, decode)
        decision = self._policies.route(task, view, prefill, self._loop.now_s)
        if not self._workers[decision.worker_id].memory.ever_fits(round_.prompt_tokens + 1):
            decision = local(view, PREFILL_WORKER_REFUSED)
        self._enter(round_, task, decision, coordinator)

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

    def _enter(self, round_: ActiveRound, task: PrefillTask, decision: RouteDecision, coordinator: int) -> None:
        record = round_.record
        worker = round_.prefill = self._workers[decision.worker_id]
        record.route, record.reason = decision.route.value, decision.reason
        record.worker_id, record.decode_worker_id = worker.worker_id, round_.decode.worker_id
        round_.session.users.add(worker)
        self._views.entered(coordinator, worker, task)
        self._prefills.enter(round_, task, fetches=decision.route is Route.REMOTE and task.hist_tokens > 0)
