"""The sessions of a simulation: their state, and their life from one round to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from ampd.serving.moves import drops_history
from ampd.serving.prefill_queue import QueueEntry
from ampd.types import PrefillTask
from planner.simulator.options import World
from planner.simulator.outcome import SimulatedRound
from planner.simulator.shared_prefixes import SessionPrefix
from planner.simulator.worker import SimulatedWorker
from workloads.trace import Round, Session


class ActiveSession:
    """A session and how far it has come.

    Attributes:
        decode: the worker it is bound to, from its first round on.
        moved_s: when it moved to another owner last.
        users: workers that may hold KV of it.
    """

    def __init__(self, session: Session) -> None:
        self.session_id = session.session_id
        self.rounds: tuple[Round, ...] = session.rounds
        self.index = 0
        self.context_tokens = 0
        self.decode: SimulatedWorker | None = None
        self.has_missed = False
        self.moved_s = -inf
        self.users: set[SimulatedWorker] = set()


class ActiveRound:
    """A round between its request and its last token.

    Attributes:
        prefill, decode: the workers that prefill and decode it; the same one if its route is local.
        holder: the worker that its history is read from: `decode`, or the owner before if the session moves.
        recent: its entry in the recent load; None: the load is not recorded.
        read_tokens: KV that was read last, to go behind the `behind_tokens` that the reader held then.
    """

    def __init__(self, session: ActiveSession, record: SimulatedRound, decode: SimulatedWorker) -> None:
        self.session = session
        self.record = record
        self.decode = decode
        self.prefill = self.holder = decode
        self.prompt_tokens = record.hist_tokens + record.incr_tokens
        self.behind_tokens = 0
        self.read_tokens = 0
        self.entry: QueueEntry | None = None
        self.is_started = False
        self.fetched = False

    @property
    def moves(self) -> bool:
        """Whether its session gets another owner with this round."""
        return self.holder is not self.decode

    @property
    def task(self) -> PrefillTask:
        """What is left of its prefill."""
        assert self.entry is not None
        return self.entry.task

    def begin_read(self, source: SimulatedWorker, target: SimulatedWorker, most_tokens: int) -> int:
        """Note a read of what the target lacks of the context's first `most_tokens`; returns the tokens that travel."""
        session_id = self.record.session_id
        self.behind_tokens = target.memory.held_tokens(session_id)
        readable_tokens = min(most_tokens, source.memory.resident.held_tokens(session_id))
        self.read_tokens = max(readable_tokens - self.behind_tokens, 0)
        if self.read_tokens and not target.prefers_read(
            session_id, self.prompt_tokens, readable_tokens, source.parallelism
        ):
            self.read_tokens = 0
        return self.read_tokens

    def usable_read_tokens(self, held_tokens: int) -> int:
        """The part of the KV that was read that continues the `held_tokens` that are there now."""
        if held_tokens < self.behind_tokens:
            return 0  # the KV that was to come before it was evicted meanwhile
        return max(self.behind_tokens + self.read_tokens - held_tokens, 0)


class SessionRunner:
    """Sends the rounds of sessions and records their ends.

    Args:
        send: hands a session's next round to the coordinators.
        on_round: called after each round.

    Attributes:
        finished: rounds in order of their end.
        sessions_over: how many sessions have ended.
    """

    def __init__(
        self,
        world: World,
        workers: Sequence[SimulatedWorker],
        send: Callable[[ActiveSession], None],
        on_round: Callable[[SimulatedRound], object],
    ) -> None:
        self.finished: list[SimulatedRound] = []
        self.sessions_over = 0
        self._loop = world.loop
        self._slo = world.slo
        self._prefixes = world.prefixes
        self._page_tokens = world.options.page_size_tokens
        self._idle_tokens = world.options.idle_tokens
        self._owners = [worker for worker in workers if worker.role.owns_sessions]
        self._given_tokens = [0] * len(self._owners)
        self._send = send
        self._on_round = on_round

    def arrive(self, session: Session) -> None:
        """The session's first round is sent now."""
        self._send(self._active(session))

    def wait(self, session: Session) -> None:
        """The session is between two rounds now. The next one is sent when it arrives."""
        self._loop.at(session.arrival_s, self._send, self._active(session))

    def _active(self, session: Session) -> ActiveSession:
        active = ActiveSession(session)
        if session.shared_prefix is not None:
            page = self._page_tokens
            tokens = session.shared_prefix.tokens // page * page
            self._prefixes[session.session_id] = SessionPrefix(session.shared_prefix.id, tokens)
        if (tokens := self._idle_tokens.get(session.session_id, 0)) > 0:
            self._bind(active, tokens)
        return active

    def _bind(self, session: ActiveSession, tokens: int) -> None:
        """Bind an idle session to the worker that owns the least KV. It holds the session's KV, if there is room."""
        place = self._given_tokens.index(min(self._given_tokens))
        self._given_tokens[place] += tokens
        worker = self._owners[place]
        if worker.memory.reserve(session.session_id, tokens):
            worker.memory.settle(session.session_id, tokens)
        session.context_tokens = tokens
        session.decode = worker
        session.users.add(worker)

    def finish(self, round_: ActiveRound, now_s: float) -> None:
        """The round's last token is out."""
        record, session = round_.record, round_.session
        record.e2e_s = now_s - record.sent_s
        if record.output_tokens > 1 and record.ttft_s is not None:
            record.itl_s = (record.e2e_s - record.ttft_s) / (record.output_tokens - 1)
        session.context_tokens = round_.prompt_tokens + record.output_tokens
        session.has_missed = session.has_missed or not self._slo.met(record.ttft_s, record.itl_s)
        self._leave_history(round_)
        session.index += 1
        if session.index == len(session.rounds):
            self.end(session, record)
            return
        self.finished.append(record)
        self._on_round(record)
        self._loop.at(now_s + session.rounds[session.index].tool_s, self._send, session)

    def _leave_history(self, round_: ActiveRound) -> None:
        """After the first round at a new owner the old one may drop its KV. Here every round that began completes."""
        before = round_.holder
        if drops_history(before.worker_id, round_.decode.worker_id, round_.prefill.worker_id):
            before.memory.release(round_.session.session_id)

    def end(self, session: ActiveSession, record: SimulatedRound) -> None:
        """The session ends with this round, the last one or a refused one."""
        session.index = len(session.rounds)
        self.sessions_over += 1
        self.finished.append(record)
        self._on_round(record)
        for worker in session.users:
            worker.memory.release(session.session_id)
