"""The life of sessions in the cluster: bind, route, prefill here or there, move KV, decode, run the tool, again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ampd.perf.model import PerformanceModel
from ampd.policies.passes import as_one
from ampd.policies.slicing.whole import WholeSlicing
from ampd.serving.prefill_queue import QueueEntry, Stage
from ampd.types import PrefillTask, Role, Route, RouteDecision, Slo
from planner.simulator.events import EventLoop
from planner.simulator.links import Links, Transfer
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.outcome import SimulatedRound, Span
from planner.simulator.sequence import EngineSequence
from planner.simulator.views import Views
from planner.simulator.worker import SimulatedWorker
from workloads.results import meets
from workloads.trace import Round, Session, kept_tokens

_UNLIMITED = 1 << 62


class ActiveSession:
    """A session and how far it has come.

    Attributes:
        decode: the worker it is bound to, from its first round on.
        users: workers that may hold KV of it.
    """

    __slots__ = ("context_tokens", "decode", "has_missed", "index", "rounds", "session_id", "users")

    def __init__(self, session: Session) -> None:
        self.session_id = session.session_id
        self.rounds: tuple[Round, ...] = session.rounds
        self.index = 0
        self.context_tokens = 0
        self.decode: SimulatedWorker | None = None
        self.has_missed = False
        self.users: set[SimulatedWorker] = set()


class ActiveRound:
    """A round between its request and its last token.

    Attributes:
        staged_tokens: KV that was read last, to go behind the `behind_tokens` that the reader held then.
    """

    __slots__ = (
        "behind_tokens",
        "decode",
        "entry",
        "fetched",
        "is_started",
        "prefill",
        "prompt_tokens",
        "record",
        "session",
        "staged_tokens",
    )

    def __init__(self, session: ActiveSession, record: SimulatedRound, decode: SimulatedWorker) -> None:
        self.session = session
        self.record = record
        self.decode = decode
        self.prefill = decode
        self.prompt_tokens = record.hist_tokens + record.incr_tokens
        self.behind_tokens = 0
        self.staged_tokens = 0
        self.entry: QueueEntry | None = None
        self.is_started = False
        self.fetched = False

    @property
    def task(self) -> PrefillTask:
        """What is left of its prefill."""
        assert self.entry is not None
        return self.entry.task

    def usable_staged_tokens(self, held_tokens: int) -> int:
        """What of the staged KV continues the `held_tokens` that are there now."""
        if held_tokens < self.behind_tokens:
            return 0  # what was to come before it was evicted meanwhile
        return max(self.behind_tokens + self.staged_tokens - held_tokens, 0)


class RoundRunner:
    """Serves sessions on the workers; what the coordinators and the worker shells do live.

    Attributes:
        finished: rounds in order of their end.
        sessions_over: how many sessions have ended.

    Args:
        views: what decisions see.
        spans: where to note KV moves; None: nowhere.
        on_round: called after each round.
        max_context_tokens: longest context of the model; 0: unlimited.
        belief: the times that the policies count on; default: `model`.
    """

    def __init__(
        self,
        workers: Sequence[SimulatedWorker],
        views: Views,
        links: Links,
        loop: EventLoop,
        model: PerformanceModel,
        policies: Policies,
        slo: Slo,
        options: SimulationOptions,
        spans: list[Span] | None,
        on_round: Callable[[], None],
        max_context_tokens: int,
        belief: PerformanceModel | None = None,
    ) -> None:
        self.finished: list[SimulatedRound] = []
        self.sessions_over = 0
        self._workers = {worker.worker_id: worker for worker in workers}
        self._context_limit = max_context_tokens or _UNLIMITED
        self._views = views
        self._links = links
        self._loop = loop
        self._model = model
        self._belief = belief or model
        self._policies = policies
        self._slo = slo
        self._options = options
        self._spans = spans
        self._on_round = on_round
        self._rng = random.Random(f"{options.seed}/coordinators")
        self._page = options.page_size_tokens
        self._passes: dict[int, list[ActiveRound]] = {}
        self._holds: dict[str, list[list[Callable[[], None]]]] = {}
        # With chunked prefill the engine itself shares out its passes.
        self._slices = not options.chunk_tokens and not isinstance(policies.slicing, WholeSlicing)

    def arrive(self, session: Session) -> None:
        """The session's first round is sent now."""
        self._send(ActiveSession(session))

    # -- the coordinator

    def _send(self, session: ActiveSession) -> None:
        """A round's request leaves its client."""
        if self._options.dispatch_s:
            sent_s = self._loop.now_s
            self._loop.at(sent_s + self._options.dispatch_s, self._place, (session, sent_s))
        else:
            self._place((session, self._loop.now_s))

    def _place(self, sent: tuple[ActiveSession, float]) -> None:
        session, sent_s = sent
        item = session.rounds[session.index]
        kept = kept_tokens(item, session.context_tokens)
        record = SimulatedRound(session.session_id, session.index, sent_s, kept, item.incr_tokens, item.output_tokens)
        prompt_tokens = kept + item.incr_tokens
        record.error = self._refusal(session, prompt_tokens + item.output_tokens)
        if record.error is not None:
            self._end_session(session, record)
            return
        coordinator = self._rng.randrange(self._options.coordinators) if self._options.coordinators > 1 else 0
        decode = session.decode or self._bind(session, record, coordinator)
        if kept < session.context_tokens:
            session.context_tokens = kept
            for worker in session.users:
                worker.memory.cut(session.session_id, kept)
        self._route(ActiveRound(session, record, decode), coordinator)

    def _refusal(self, session: ActiveSession, tokens: int) -> str | None:
        """Why a round with so many tokens of prompt and output cannot be served; None if it can."""
        # A session that is bound stays there, even if another worker had more memory.
        able = (
            [session.decode] if session.decode else [one for one in self._workers.values() if one.role is Role.DECODE]
        )
        memory_limit = max(worker.memory.capacity_tokens or _UNLIMITED for worker in able)
        for limit, what in (
            (self._context_limit, "the longest context of the model is"),
            (memory_limit, "the KV memory of a decode worker holds"),
        ):
            if tokens > limit:
                return f"prompt and output have {tokens} tokens, {what} {limit} tokens"
        return None

    def _bind(self, session: ActiveSession, record: SimulatedRound, coordinator: int) -> SimulatedWorker:
        needed = record.hist_tokens + record.incr_tokens + record.output_tokens
        views = [
            view
            for view in self._views.decode(coordinator)
            if not 0 < view.kv_capacity_tokens < needed  # as live: a worker that can never take the prompt is no choice
        ]
        task = self._task(session, 0, record.incr_tokens)
        chosen = self._policies.binding.bind(task, views, self._belief, self._loop.now_s, self._rng)
        session.decode = self._workers[chosen]
        session.users.add(session.decode)
        return session.decode

    def _route(self, one: ActiveRound, coordinator: int) -> None:
        record, decode, now_s = one.record, one.decode, self._loop.now_s
        session_id = record.session_id
        # At least one token is always computed: the one whose logits give the first output.
        hist_tokens = min(record.hist_tokens, decode.memory.held.get(session_id, 0), one.prompt_tokens - 1)
        record.missing_tokens = max(record.hist_tokens - self._page - hist_tokens, 0)
        task = self._task(one.session, hist_tokens, one.prompt_tokens - hist_tokens)
        prefill = self._views.prefill(coordinator)
        if decode.role is Role.PREFILL:
            # A worker may have become a prefill worker with sessions still bound to it: its own rounds there are local.
            prefill = [view for view in prefill if view.worker_id != decode.worker_id]
        decision = self._policies.routing.route(
            task,
            self._views.worker(coordinator, decode),
            prefill,
            self._belief,
            now_s,
            self._rng,
        )
        if not self._workers[decision.worker_id].memory.ever_fits(one.prompt_tokens + 1):
            # As live: a prefill worker that cannot take the prompt refuses it, and the decode worker does it.
            decision = RouteDecision(Route.LOCAL, decode.worker_id, "prefill-worker-refused")
        self._enter(one, task, decision, coordinator)

    def _task(self, session: ActiveSession, hist_tokens: int, incr_tokens: int) -> PrefillTask:
        return PrefillTask(
            f"{session.session_id}/{session.index}",
            session.session_id,
            hist_tokens,
            incr_tokens,
            self._loop.now_s,
            self._slo,
            session_missed=session.has_missed,
        )

    def _enter(self, one: ActiveRound, task: PrefillTask, decision: RouteDecision, coordinator: int) -> None:
        record = one.record
        worker = one.prefill = self._workers[decision.worker_id]
        record.route, record.reason = decision.route.value, decision.reason
        record.worker_id, record.decode_worker_id = worker.worker_id, one.decode.worker_id
        one.session.users.add(worker)
        is_remote = decision.route is Route.REMOTE
        self._views.entered(coordinator, worker, task)

        def turn(entry: QueueEntry) -> None:
            one.entry = entry
            if entry.stage is Stage.COMPUTING:
                self._compute(one, entry)
            elif entry.fetches:
                self._fetch_history(one, entry)
            else:
                entry.fetched()

        worker.queue.enter(task, is_remote and task.hist_tokens > 0, turn)

    # -- prefill

    def _fetch_history(self, one: ActiveRound, entry: QueueEntry) -> None:
        """Read what the prefill worker lacks of the history, as far as the decode worker still has it."""
        session_id, source, target = one.record.session_id, one.decode, one.prefill
        available = min(entry.task.hist_tokens, source.memory.held.get(session_id, 0))
        held = target.memory.held.get(session_id, 0)
        missing = max(available - held, 0)
        one.behind_tokens, one.staged_tokens = held, missing
        one.record.kv_history_tokens = missing
        one.fetched = True
        # What is here already goes with what is read: neither may be evicted before the other is used.
        target.memory.keep(session_id)
        source.memory.keep(session_id)

        def arrived() -> None:
            source.memory.unkeep(session_id)
            entry.fetched()

        self._move("kv-history", source, target, missing, session_id, arrived)

    def _compute(self, one: ActiveRound, entry: QueueEntry) -> None:
        """The engine takes the prefill."""
        record, worker = one.record, one.prefill
        if not one.is_started:
            one.is_started = True
            record.queued_s = self._loop.now_s - entry.task.arrival_s
            # Between slices nothing else protects what is there.
            worker.memory.keep(record.session_id)
        if len(entry.mates) > 1:
            self._join_pass(one, entry)
        elif not self._slices or not self._slice(one, entry):
            self._submit([one])

    def _join_pass(self, one: ActiveRound, entry: QueueEntry) -> None:
        """Wait for those whose turn it is too; the last of them starts the pass."""
        members = self._passes.setdefault(id(entry.mates), [])
        members.append(one)
        if len(members) == len(entry.mates):
            del self._passes[id(entry.mates)]
            self._start_pass(members)

    def _start_pass(self, members: list[ActiveRound]) -> None:
        """Several prefills in one pass, once the slicing policy has no objection; they are not cut."""
        if self._slices:
            worker, now_s = members[0].prefill, self._loop.now_s
            task = as_one([one.task for one in members])
            running = worker.engine.running(now_s, task.slo.itl_s)
            wait_s = self._policies.slicing.slice(task, running, worker.parallelism, self._belief, now_s).wait_s
            if wait_s > 0.0:
                self._hold(worker, wait_s, partial(self._start_pass, members))
                return
        self._submit(members)

    def _slice(self, one: ActiveRound, entry: QueueEntry) -> bool:
        """Compute a part of what is left, or wait, as the slicing policy says; False: all of it now."""
        worker, task, now_s = one.prefill, entry.task, self._loop.now_s
        running = worker.engine.running(now_s, task.slo.itl_s)
        chosen = self._policies.slicing.slice(task, running, worker.parallelism, self._belief, now_s)
        if chosen.wait_s > 0.0:
            self._hold(worker, chosen.wait_s, partial(self._compute, one, entry))
            return True
        held = worker.memory.held.get(task.session_id, 0)
        staged = one.usable_staged_tokens(held)
        end = max((task.hist_tokens + chosen.tokens) // self._page, (held + staged) // self._page + 1) * self._page
        if chosen.tokens >= task.incr_tokens or end >= one.prompt_tokens:
            return False

        def done(_: object, __: float) -> None:
            left = replace(entry.task, hist_tokens=end, incr_tokens=one.prompt_tokens - end)
            entry.again(left)

        worker.engine.submit(
            EngineSequence(task.session_id, end, held // self._page * self._page, 0, None, done, staged)
        )
        return True

    def _hold(self, worker: SimulatedWorker, wait_s: float, resume: Callable[[], None]) -> None:
        """Leave a worker to its decode batch for so long, but not longer than until a round ends there."""
        pending = [resume]
        self._holds.setdefault(worker.worker_id, []).append(pending)
        self._loop.at(self._loop.now_s + wait_s, _resume, pending)

    def _submit(self, members: Sequence[ActiveRound]) -> None:
        """Whole prompts to the engine, for one pass; it computes what is not there yet."""
        worker = members[0].prefill
        worker.engine.submit(*[self._sequence(one) for one in members])
        for one in members:
            one.record.postponements = one.task.postponements
            worker.memory.unkeep(one.record.session_id)
            if one.fetched:
                worker.memory.unkeep(one.record.session_id)

    def _sequence(self, one: ActiveRound) -> EngineSequence:
        record, worker = one.record, one.prefill
        is_local = worker is one.decode
        held = worker.memory.held.get(record.session_id, 0)
        return EngineSequence(
            record.session_id,
            one.prompt_tokens,
            min(held, one.prompt_tokens - 1) // self._page * self._page,
            record.output_tokens if is_local else 1,
            lambda _, now_s: self._first_token(one, now_s),
            (lambda _, now_s: self._last_token(one, now_s)) if is_local else (lambda _, __: self._hand_over(one)),
            one.usable_staged_tokens(held),
        )

    def _first_token(self, one: ActiveRound, now_s: float) -> None:
        record, worker, entry = one.record, one.prefill, one.entry
        assert entry is not None
        record.ttft_s = now_s - record.sent_s
        worker.ttft.add(now_s - entry.task.arrival_s, now_s)
        entry.leave()

    # -- from the prefill worker to the decode worker

    def _hand_over(self, one: ActiveRound) -> None:
        """The first token is out; the decode worker reads the increment before it admits the round."""
        record, session_id = one.record, one.record.session_id
        one.prefill.memory.keep(session_id)
        first_token_s = self._loop.now_s
        wait_s = self._options.hand_over_s
        if record.output_tokens == 1:
            # The round is over for its client; the KV still goes where the next round looks for it.
            self._loop.at(first_token_s + wait_s, self._fetch_increment, (one, -1.0))
            self._finish(one, first_token_s)
        elif wait_s:
            self._loop.at(first_token_s + wait_s, self._fetch_increment, (one, first_token_s))
        else:
            self._fetch_increment((one, first_token_s))

    def _fetch_increment(self, handed: tuple[ActiveRound, float]) -> None:
        one, first_token_s = handed
        source, target, session_id = one.prefill, one.decode, one.record.session_id
        target.memory.keep(session_id)
        available, held = (worker.memory.held.get(session_id, 0) for worker in (source, target))
        missing = max(available - held, 0)
        one.behind_tokens, one.staged_tokens = held, missing
        one.record.kv_increment_tokens = missing

        def arrived() -> None:
            source.memory.unkeep(session_id)
            self._decode(one, first_token_s)

        self._move("kv-increment", source, target, missing, session_id, arrived)

    def _decode(self, one: ActiveRound, first_token_s: float) -> None:
        record, worker = one.record, one.decode
        session_id, memory = record.session_id, worker.memory
        if first_token_s < 0.0:
            # Before the protection ends: to make room, the memory must not evict what it counts on.
            self._take_over(one)
            memory.unkeep(session_id)
            return
        held = memory.held.get(session_id, 0)
        sequence = EngineSequence(
            session_id,
            one.prompt_tokens + 1,
            min(held, one.prompt_tokens),
            record.output_tokens - 1,
            None,
            lambda _, now_s: self._last_token(one, now_s),
            one.usable_staged_tokens(held),
            first_token_s,
        )
        worker.engine.submit(sequence)
        memory.unkeep(session_id)
        worker.changed()

    def _take_over(self, one: ActiveRound) -> None:
        """Keep the KV of a round of one token, if its session is not busy with the next one already."""
        memory, session, session_id = one.decode.memory, one.session, one.record.session_id
        # The next round may have rewritten the context meanwhile, and may even be over.
        tokens = min(one.prompt_tokens, session.context_tokens)
        is_latest = session.index == one.record.index + 1 < len(session.rounds)
        if is_latest and not memory.is_running(session_id) and memory.reserve(session_id, tokens):
            memory.settle(session_id, tokens)

    # -- the end of a round

    def _last_token(self, one: ActiveRound, now_s: float) -> None:
        one.decode.changed()
        for pending in self._holds.pop(one.decode.worker_id, ()):
            # Not before the engine has gone on: it does not wait for what is submitted in answer to its last step.
            self._loop.at(now_s, _resume, pending)
        self._finish(one, now_s)

    def _finish(self, one: ActiveRound, now_s: float) -> None:
        record, session = one.record, one.session
        record.e2e_s = now_s - record.sent_s
        if record.output_tokens > 1 and record.ttft_s is not None:
            record.itl_s = (record.e2e_s - record.ttft_s) / (record.output_tokens - 1)
        session.context_tokens = one.prompt_tokens + record.output_tokens
        session.has_missed = session.has_missed or not meets(record, self._slo)
        session.index += 1
        if session.index == len(session.rounds):
            self._end_session(session, record)
            return
        self.finished.append(record)
        self._on_round()
        self._loop.at(now_s + session.rounds[session.index].tool_s, self._send, session)

    def _end_session(self, session: ActiveSession, record: SimulatedRound) -> None:
        session.index = len(session.rounds)
        self.sessions_over += 1
        self.finished.append(record)
        self._on_round()
        for worker in session.users:
            worker.memory.release(session.session_id)

    # -- KV on its way

    def _move(
        self,
        kind: str,
        source: SimulatedWorker,
        target: SimulatedWorker,
        tokens: int,
        session_id: str,
        arrived: Callable[[], None],
    ) -> None:
        if not tokens:
            arrived()
            return
        seconds = self._options.kv_read_s + self._model.kv_transfer_s(tokens, source.parallelism, target.parallelism)

        def done(transfer: Transfer) -> None:
            if self._spans is not None:
                detail: dict[str, Any] = {"session": session_id, "tokens": tokens, "from": source.worker_id}
                self._spans.append(Span(target.worker_id, "kv-in", kind, transfer.started_s, self._loop.now_s, detail))
            arrived()

        self._links.start(source.worker_id, target.worker_id, seconds, done)


def _resume(pending: list[Callable[[], None]]) -> None:
    """Once, whatever comes first."""
    while pending:
        pending.pop()()
