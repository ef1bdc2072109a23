"""The state of the sessions and rounds in a simulation."""

from __future__ import annotations

from math import inf

from ampd.recent_load import RecentRound
from ampd.serving.prefill_queue import QueueEntry
from ampd.types import PrefillTask
from planner.simulator.options import UnderWay
from planner.simulator.outcome import SimulatedRound
from planner.simulator.worker import SimulatedWorker
from workloads.trace import Round, Session


class ActiveSession:
    """A session and how far it has come.

    Attributes:
        begun: how far it was when the simulation began, until its first round is on its way.
        decode: the worker it is bound to, from its first round on.
        moved_s: when it moved to another owner last.
        users: workers that may hold KV of it.
    """

    __slots__ = ("begun", "context_tokens", "decode", "has_missed", "index", "moved_s", "rounds", "session_id", "users")

    def __init__(self, session: Session) -> None:
        self.session_id = session.session_id
        self.rounds: tuple[Round, ...] = session.rounds
        self.begun: UnderWay | None = None
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
        is_exact: the history of its task is what its prefill worker really holds.
        uncounted_tokens: history whose origin at the prefill worker is not counted yet; None: it is counted.
        recent: its entry in the recent load; None: the load is not recorded.
        read_tokens: KV that was read last, to go behind the `behind_tokens` that the reader held then.
    """

    __slots__ = (
        "behind_tokens",
        "decode",
        "entry",
        "fetched",
        "holder",
        "is_exact",
        "is_started",
        "prefill",
        "prompt_tokens",
        "read_tokens",
        "recent",
        "record",
        "session",
        "uncounted_tokens",
    )

    def __init__(self, session: ActiveSession, record: SimulatedRound, decode: SimulatedWorker) -> None:
        self.session = session
        self.record = record
        self.decode = decode
        self.prefill = self.holder = decode
        self.prompt_tokens = record.hist_tokens + record.incr_tokens
        self.behind_tokens = 0
        self.read_tokens = 0
        self.uncounted_tokens: int | None = record.hist_tokens
        self.entry: QueueEntry | None = None
        self.is_exact = False
        self.is_started = False
        self.fetched = False
        self.recent: RecentRound | None = None

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
        readable_tokens = min(most_tokens, source.resident.held_tokens(session_id))
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
