"""The life of sessions in the cluster: a round, its tool, the next round, until the last one."""

from __future__ import annotations

from collections.abc import Callable

from ampd.serving.moves import drops_history
from planner.simulator.outcome import SimulatedRound
from planner.simulator.rounds import ActiveRound, ActiveSession
from planner.simulator.shared_prefixes import SessionPrefix
from planner.simulator.world import World
from workloads.trace import Session


class SessionRunner:
    """Sends the rounds of sessions and records their ends.

    Args:
        begin: prepares a session that arrives.
        send: hands a session's next round to the coordinators.
        on_round: called after each round.

    Attributes:
        finished: rounds in order of their end.
        sessions_over: how many sessions have ended.
    """

    def __init__(
        self,
        world: World,
        begin: Callable[[ActiveSession], None],
        send: Callable[[ActiveSession], None],
        on_round: Callable[[SimulatedRound], object],
    ) -> None:
        self.finished: list[SimulatedRound] = []
        self.sessions_over = 0
        self._loop = world.loop
        self._slo = world.slo
        self._prefixes = world.prefixes
        self._page_tokens = world.options.page_size_tokens
        self._begin = begin
        self._send = send
        self._on_round = on_round

    def arrive(self, session: Session) -> None:
        """The session's first round is sent now."""
        self._send(self._begun(session))

    def wait(self, session: Session) -> None:
        """The session is between two rounds now. The next one is sent when it arrives."""
        self._loop.at(session.arrival_s, self._send, self._begun(session))

    def _begun(self, session: Session) -> ActiveSession:
        active = ActiveSession(session)
        if session.shared_prefix is not None:
            page = self._page_tokens
            tokens = session.shared_prefix.tokens // page * page
            self._prefixes[session.session_id] = SessionPrefix(session.shared_prefix.id, tokens)
        self._begin(active)
        return active

    def finish(self, round_: ActiveRound, now_s: float) -> None:
        """The round's last token is out."""
        record, session = round_.record, round_.session
        record.e2e_s = now_s - record.sent_s
        if record.output_tokens > 1 and record.ttft_s is not None:
            record.itl_s = (record.e2e_s - record.ttft_s) / (record.output_tokens - 1)
        session.context_tokens = round_.prompt_tokens + record.output_tokens
        is_met = self._slo.met(record.ttft_s, record.itl_s)
        session.has_missed = session.has_missed or not is_met
        if round_.recent is not None:
            round_.recent.end(now_s, record.output_tokens, is_met)
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
