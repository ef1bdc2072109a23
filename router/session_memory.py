"""This replica's memory of its sessions: the last context and the binding, to see how much of a prompt is known.

It is only a hint, because another replica may have served the session since. Only the worker knows which KV exists.

A binding that outlives its session is more than a wrong hint: the store takes a binding that it lacks for one that it
has lost, and counts it against no limit. So a session is forgotten when any replica ends it, and with its TTL.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ampd.state.store import Binding, SessionLimits

_ENTRY_BYTES = 512
"""Approximate size of an entry without its tokens: dictionary slot, key, objects."""


def common_prefix_tokens(left: bytes, right: bytes) -> int:
    """Length in tokens of the longest common prefix of two packed contexts."""
    if right.startswith(left) or left.startswith(right):
        return min(len(left), len(right)) // 4
    size = min(len(left), len(right))
    differs = np.frombuffer(left, np.uint32, size // 4) != np.frombuffer(right, np.uint32, size // 4)
    return int(differs.argmax())


@dataclass(frozen=True, slots=True)
class Overlap:
    """How a prompt relates to the context that is remembered.

    Attributes:
        common_tokens: longest common prefix.
        known_tokens: length of the remembered context; 0 if none is.
        kept_tokens: the common prefix without tokens that were never computed.
    """

    common_tokens: int = 0
    known_tokens: int = 0
    kept_tokens: int = 0

    @property
    def is_rewritten(self) -> bool:
        """Whether the prompt departs from the remembered context. Its last token does not count: it has no KV."""
        return self.common_tokens < self.known_tokens - 1


@dataclass(frozen=True, slots=True)
class SessionOwner:
    """The client's side of a session.

    Attributes:
        client_id: the client's name of it.
        tenant: see `ampd.keys`.
        served_s: the end of its last round here.
    """

    client_id: str
    tenant: str
    served_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """What this replica knows of a session after the last round that it served.

    Attributes:
        binding: the binding that held then; None: the session was not served here.
        context: the last prompt and its output, packed.
        computed_tokens: of the context; the prefill of the rest did not end.
        prompt_tokens: of the context, without the output.
        has_missed: a round missed one of its targets.
        owner: the client's side; None: it is not known.
        moved_s: when a round found the session at another owner than the round before; minus infinity: never.
        holder: the owner before, if the session moved and no round has been completed since; it has the history.
        is_settled: the last round was served here, and was completed.
    """

    binding: Binding | None = None
    context: bytes = b""
    computed_tokens: int = 0
    prompt_tokens: int = 0
    expires_s: float = float("inf")
    has_missed: bool = False
    owner: SessionOwner | None = None
    moved_s: float = float("-inf")
    holder: str | None = None
    is_settled: bool = False

    def overlap(self, prompt: bytes) -> Overlap:
        """Compare a packed prompt with the last context."""
        common_tokens = common_prefix_tokens(self.context, prompt)
        return Overlap(common_tokens, len(self.context) // 4, min(common_tokens, self.computed_tokens))


UNKNOWN = Session()


class SessionMemory:
    """Contexts and bindings of the sessions served here, least recently used out first.

    Args:
        max_bytes: bound on the memory of the contexts; bindings of forgotten contexts go with them.
        limits: says for how long a session lives after a round.

    Attributes:
        on_forget: called with each session that is forgotten.
    """

    def __init__(self, max_bytes: int, limits: SessionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._limits = limits
        self._clock = clock
        self._bytes = 0
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self.on_forget: Callable[[str], object] = lambda _: None

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, session_id: str) -> Session:
        """What is known of a session."""
        session = self._sessions.get(session_id, UNKNOWN)
        if session.expires_s <= self._clock():
            self.forget(session_id)
            return UNKNOWN
        return session

    def rebound(self, binding: Binding) -> None:
        """Another replica has moved the session. What was computed since is still where it was served from here."""
        session = self.find(binding.session_id)
        if session.binding is not None:
            holder = session.holder or session.binding.worker_id
            self._sessions[binding.session_id] = replace(session, binding=binding, holder=holder, is_settled=False)

    def remember(
        self,
        binding: Binding,
        context: bytes,
        *,
        computed_tokens: int | None = None,
        prompt_tokens: int = 0,
        missed: bool = False,
        moved: bool = False,
        holder: str | None = None,
        owner: SessionOwner | None = None,
        is_complete: bool = True,
    ) -> None:
        """Keep a session's binding and packed context after a round.

        Args:
            computed_tokens: of the context, if the round ended before its prefill did; None: all.
            prompt_tokens: of the context, without the output.
            missed: the round missed a target.
            moved: the session moved with this round. It may have been unknown here before.
            holder: the owner before, which still has KV that the round has not brought to the new one.
        """
        known = self.find(binding.session_id)
        before, moved_s = known.binding, known.moved_s
        if before is not None and before.epoch > binding.epoch:
            # The session has moved meanwhile. What this round has computed is still at its own worker.
            holder, binding = holder or binding.worker_id, before
        # A second round may have been served elsewhere. Then the store says that the session is bound.
        expires_s = self._clock() + (self._limits.new_ttl_s if before is None else self._limits.ttl_s)
        moved = moved or (before is not None and before.worker_id != binding.worker_id)
        if owner is not None and moved:
            moved_s = owner.served_s
        self._drop(binding.session_id)
        self._sessions[binding.session_id] = Session(
            binding,
            context,
            len(context) // 4 if computed_tokens is None else computed_tokens,
            prompt_tokens,
            expires_s,
            missed or known.has_missed,
            owner,
            moved_s,
            holder,
            is_complete and holder is None,
        )
        self._bytes += len(context) + _ENTRY_BYTES
        while self._bytes > self._max_bytes and self._sessions:
            self.forget(next(iter(self._sessions)))

    def forget(self, session_id: str) -> None:
        """Drop a session that ended."""
        self._drop(session_id)
        self.on_forget(session_id)

    def _drop(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._bytes -= len(session.context) + _ENTRY_BYTES
