"""This replica's memory of its sessions: the last context and the binding, to see how much of a prompt is known.

It is only a hint, because another replica may have served the session since. Only the worker knows which KV exists.

A binding that outlives its session is more than a wrong hint: the store takes a binding that it lacks for one that it
has lost, and counts it against no limit. So a session is forgotten when any replica ends it, and with its TTL.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ampd.state.store import Binding, SessionLimits

_ENTRY_BYTES = 512
"""Approximate size of an entry without its tokens: dictionary slot, key, objects."""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as native 32-bit words."""
    return array("I", token_ids).tobytes()


def common_prefix_tokens(left: bytes, right: bytes) -> int:
    """Length in tokens of the longest common prefix of two packed contexts."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size // 4
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


@dataclass(slots=True)
class _Entry:
    binding: Binding
    context: bytes
    computed_tokens: int
    expires_s: float
    has_missed: bool = False
    owner: SessionOwner | None = None
    moved_s: float = float("-inf")
    holder: str | None = None
    is_settled: bool = True


class SessionMemory:
    """Contexts and bindings of the sessions served here, least recently used out first.

    Args:
        max_bytes: bound on the memory of the contexts; bindings of forgotten contexts go with them.
        limits: says for how long a session lives after a round.
    """

    def __init__(self, max_bytes: int, limits: SessionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._limits = limits
        self._clock = clock
        self._bytes = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def binding(self, session_id: str) -> Binding | None:
        """The binding that held when this replica last served the session."""
        entry = self._find(session_id)
        return entry.binding if entry else None

    def rebound(self, binding: Binding) -> None:
        """Another replica has moved the session."""
        if (entry := self._find(binding.session_id)) is not None:
            entry.binding, entry.is_settled = binding, False

    def is_settled(self, session_id: str) -> bool:
        """Whether the session's last round was served here, and was completed."""
        entry = self._find(session_id)
        return entry is not None and entry.is_settled

    def has_missed(self, session_id: str) -> bool:
        """Whether a round of the session that was served here missed one of its targets."""
        entry = self._find(session_id)
        return entry is not None and entry.has_missed

    def owner(self, session_id: str) -> SessionOwner | None:
        """The client's side of a session that was served here; None: it was not."""
        entry = self._find(session_id)
        return entry.owner if entry else None

    def moved_s(self, session_id: str) -> float:
        """When a round that was served here found the session at another owner than the round before."""
        entry = self._find(session_id)
        return entry.moved_s if entry else float("-inf")

    def holder(self, session_id: str) -> str | None:
        """The owner before, if the session has moved and no round served here was complete since then."""
        entry = self._find(session_id)
        return entry.holder if entry else None

    def overlap(self, session_id: str, prompt: bytes) -> Overlap:
        """Compare a packed prompt with the session's last context."""
        entry = self._find(session_id)
        if entry is None or not entry.context:
            return Overlap()
        common_tokens = common_prefix_tokens(entry.context, prompt)
        return Overlap(common_tokens, len(entry.context) // 4, min(common_tokens, entry.computed_tokens))

    def remember(
        self,
        binding: Binding,
        context: bytes,
        *,
        computed_tokens: int | None = None,
        missed: bool = False,
        moved: bool = False,
        holder: str | None = None,
        owner: SessionOwner | None = None,
        is_complete: bool = True,
    ) -> None:
        """Keep a session's binding and packed context after a round.

        Args:
            computed_tokens: of the context, if the round ended before its prefill did; None: all.
            missed: the round missed a target.
            moved: the session moved with this round. It may have been unknown here before.
            holder: the owner before, which still has KV that the round has not brought to the new one.
        """
        missed = missed or self.has_missed(binding.session_id)
        moved_s, before = self.moved_s(binding.session_id), self.binding(binding.session_id)
        if before is not None and before.epoch > binding.epoch:
            # The session has moved meanwhile. What this round has computed is still at its own worker.
            holder, binding = holder or binding.worker_id, before
        # A second round may have been served elsewhere. Then the store says that the session is bound.
        expires_s = self._clock() + (self._limits.new_ttl_s if before is None else self._limits.ttl_s)
        moved = moved or (before is not None and before.worker_id != binding.worker_id)
        if owner is not None and moved:
            moved_s = owner.served_s
        self.forget(binding.session_id)
        computed = len(context) // 4 if computed_tokens is None else computed_tokens
        self._entries[binding.session_id] = _Entry(
            binding, context, computed, expires_s, missed, owner, moved_s, holder, is_complete and holder is None
        )
        self._bytes += len(context) + _ENTRY_BYTES
        while self._bytes > self._max_bytes and self._entries:
            self.forget(next(iter(self._entries)))

    def forget(self, session_id: str) -> None:
        """Drop a session that ended."""
        entry = self._entries.pop(session_id, None)
        if entry is not None:
            self._bytes -= len(entry.context) + _ENTRY_BYTES

    def _find(self, session_id: str) -> _Entry | None:
        entry = self._entries.get(session_id)
        if entry is not None and entry.expires_s <= self._clock():
            self.forget(session_id)
            return None
        return entry
