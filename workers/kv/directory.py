"""The directory of the KV pages that a worker keeps pinned: which are held, for which session, and which may go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

_CLOSED_SESSIONS_KEPT = 4096


@dataclass(slots=True)
class _Pin:
    """Consecutive pages that the engine gave in one piece and takes back in one piece."""

    keys: list[bytes]
    pages: list[int]
    sessions: set[str] = field(default_factory=set)
    leases: int = 0


@dataclass(slots=True)
class _Session:
    """One session's part: how many pages of each pin lie on the path of its latest context."""

    on_path: dict[int, int] = field(default_factory=dict)
    running: int = 0


@dataclass(slots=True)
class _Lease:
    expires_s: float
    pins: list[int]


class PageDirectory:
    """Pinned KV pages by key, the sessions that use them, and the leases that readers have on them.

    A pin is released when no session uses it and no live lease covers it. Methods that may release pins return the ids
    of the released ones, and the caller frees their memory. A pin that several sessions share
    (a common prefix) is offered by the engine once, for the session that came first. The others keep it by `touch`.
    Least recently used sessions go first when the budget is exceeded; a session with a running request stays.

    No clock and no I/O: every method that needs the time takes `now_s` (any monotonic clock, the same for all calls).
    Not thread-safe.

    Args:
        page_size: tokens per page.
        budget_tokens: what `evict` brings the directory down to.
    """

    def __init__(self, page_size: int, budget_tokens: int) -> None:
        self.page_size = page_size
        self.budget_tokens = budget_tokens
        self._ids = count()
        self._pins: dict[int, _Pin] = {}
        self._index: dict[bytes, tuple[int, int]] = {}
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._leases: dict[str, _Lease] = {}
        self._pages = 0
        self._unused_pages = 0
        self._changed: dict[str, None] = {}

    # -- what is held

    @property
    def tokens(self) -> int:
        """Tokens of all pins, those included that only a lease still keeps."""
        return self._pages * self.page_size

    @property
    def has_leases(self) -> bool:
        return bool(self._leases)

    @property
    def sessions(self) -> list[str]:
        """Sessions that are known, least recently used first."""
        return list(self._sessions)

    def held_tokens(self, session_id: str) -> int:
        """Tokens of a session's latest context that are pinned for it."""
        session = self._sessions.get(session_id)
        return sum(session.on_path.values()) * self.page_size if session else 0

    def match(self, keys: Sequence[bytes]) -> int:
        """Length in pages of the longest prefix of `keys` that is held."""
        return sum(length for _, _, length in self._spans(keys))

    def take_changed(self) -> dict[str, int]:
        """Sessions whose held tokens may have changed since the last call, with what they hold now."""
        changed = {session_id: self.held_tokens(session_id) for session_id in self._changed}
        self._changed.clear()
        return changed

    # -- what sessions do

    def add(self, session_id: str, keys: Sequence[bytes], pages: Sequence[int]) -> int | None:
        """Pin consecutive pages for a session; the newest in the order of use.

        Returns:
            The pin's id; None if the session was released and has begun nothing since: the caller keeps nothing.
        """
        if len(keys) != len(pages) or not keys:
            raise ValueError(f"{len(keys)} keys for {len(pages)} pages")
        if session_id in self._closed:
            return None
        pin_id = next(self._ids)
        pin = self._pins[pin_id] = _Pin(list(keys), list(pages), {session_id})
        for at, key in enumerate(pin.keys):
            self._index.setdefault(key, (pin_id, at))
        self._pages += len(pin.keys)
        self._use(session_id).on_path[pin_id] = len(pin.keys)
        return pin_id

    def touch(self, session_id: str, keys: Sequence[bytes], now_s: float) -> list[int]:
        """Set the session's context to `keys`: the session keeps the pages of it that are held and drops all others.

        Returns:
            Ids of the pins released: branches that the context left.
        """
        path: dict[int, int] = {}
        for pin_id, _, length in self._spans(keys):
            path[pin_id] = path.get(pin_id, 0) + length
        session = self._use(session_id)
        dropped = [pin_id for pin_id in session.on_path if pin_id not in path]
        session.on_path = path
        for pin_id in path:
            self._join(session_id, pin_id)
        return self._leave(session_id, dropped) + self.collect(now_s)

    def begin_request(self, session_id: str, keys: Sequence[bytes], now_s: float) -> list[int]:
        """`touch`, and keep the session from eviction until as many `end_request` have come; reopens it if released."""
        self._closed.pop(session_id, None)
        self._use(session_id).running += 1
        return self.touch(session_id, keys, now_s)

    def end_request(self, session_id: str, keys: Sequence[bytes], now_s: float) -> list[int]:
        """The counterpart of `begin_request`, with the context as it is now; a session released meanwhile stays so."""
        session = self._sessions.get(session_id)
        if session is None:
            return self.collect(now_s)
        session.running = max(0, session.running - 1)
        return self.touch(session_id, keys, now_s)

    def release_session(self, session_id: str, now_s: float) -> list[int]:
        """Forget a session; what only it used is released now, or when the leases on it end.

        Pages that the engine still offers for it afterwards are refused (`add` returns None) until a request begins.
        """
        self._closed[session_id] = None
        self._closed.move_to_end(session_id)
        if len(self._closed) > _CLOSED_SESSIONS_KEPT:
            self._closed.popitem(last=False)
        return self._forget(session_id) + self.collect(now_s)

    def clear(self) -> list[int]:
        """Drop everything, leases included; returns the ids of all pins."""
        pins = list(self._pins)
        self._changed.update(dict.fromkeys(self._sessions))
        for table in (self._pins, self._index, self._leases):
            table.clear()
        self._sessions = OrderedDict((name, _Session({}, session.running)) for name, session in self._sessions.items())
        self._pages = self._unused_pages = 0
        return pins

    # -- leases

    def lease(self, keys: Sequence[bytes], ttl_s: float, now_s: float) -> tuple[str, list[int]]:
        """Protect the longest held prefix of `keys` from release until `unlease`, at most for `ttl_s`.

        Returns:
            The lease's id ("" if nothing is held: nothing to give back) and the positions of the prefix's pages.
        """
        spans = list(self._spans(keys))
        if not spans:
            return "", []
        lease = _Lease(now_s + ttl_s, list(dict.fromkeys(pin_id for pin_id, _, _ in spans)))
        for pin_id in lease.pins:
            self._pins[pin_id].leases += 1
        lease_id = f"{next(self._ids):x}"
        self._leases[lease_id] = lease
        return lease_id, [page for pin, at, length in spans for page in self._pins[pin].pages[at : at + length]]

    def is_live(self, lease_id: str, now_s: float) -> bool:
        """Whether a lease has protected its pages up to now."""
        lease = self._leases.get(lease_id)
        return lease is not None and now_s < lease.expires_s

    def unlease(self, lease_id: str, now_s: float) -> list[int]:
        """End a lease; returns the ids of the pins released. An unknown lease is nothing."""
        lease = self._leases.pop(lease_id, None)
        return (self._end(lease) if lease else []) + self.collect(now_s)

    def collect(self, now_s: float) -> list[int]:
        """End the leases whose time is over; returns the ids of the pins released."""
        over = [lease_id for lease_id, lease in self._leases.items() if lease.expires_s <= now_s]
        return [pin_id for lease_id in over for pin_id in self._end(self._leases.pop(lease_id))]

    # -- the budget

    @property
    def over_budget(self) -> bool:
        """Whether pins that sessions use exceed the budget (those that only a lease keeps are on their way out)."""
        return (self._pages - self._unused_pages) * self.page_size > self.budget_tokens

    def evict(self, now_s: float) -> list[int]:
        """Forget the least recently used sessions that run nothing until the budget holds; returns released pin ids."""
        released = self.collect(now_s)
        for session_id in list(self._sessions) if self.over_budget else ():
            if not self.over_budget:
                break
            if not self._sessions[session_id].running:
                released += self._forget(session_id)
        return released

    # -- inside

    def _spans(self, keys: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
        """Held prefix of `keys` as (pin id, first page in the pin, pages)."""
        start = 0
        while start < len(keys) and (found := self._index.get(keys[start])) is not None:
            pin_id, at = found
            held = self._pins[pin_id].keys
            length = min(len(held) - at, len(keys) - start)
            if held[at : at + length] != list(keys[start : start + length]):
                length = next(i for i in range(length) if held[at + i] != keys[start + i])
            yield pin_id, at, length
            start += length

    def _use(self, session_id: str) -> _Session:
        session = self._sessions.setdefault(session_id, _Session())
        self._sessions.move_to_end(session_id)
        self._changed[session_id] = None
        return session

    def _join(self, session_id: str, pin_id: int) -> None:
        pin = self._pins[pin_id]
        if not pin.sessions:
            self._unused_pages -= len(pin.keys)
        pin.sessions.add(session_id)

    def _leave(self, session_id: str, pin_ids: Sequence[int]) -> list[int]:
        released = []
        for pin_id in pin_ids:
            pin = self._pins[pin_id]
            pin.sessions.discard(session_id)
            if not pin.sessions:
                self._unused_pages += len(pin.keys)
                released += self._drop_if_free(pin_id)
        return released

    def _forget(self, session_id: str) -> list[int]:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return []
        self._changed[session_id] = None
        return self._leave(session_id, list(session.on_path))

    def _end(self, lease: _Lease) -> list[int]:
        released = []
        for pin_id in lease.pins:
            self._pins[pin_id].leases -= 1
            released += self._drop_if_free(pin_id)
        return released

    def _drop_if_free(self, pin_id: int) -> list[int]:
        pin = self._pins[pin_id]
        if pin.sessions or pin.leases:
            return []
        del self._pins[pin_id]
        for at, key in enumerate(pin.keys):
            if self._index.get(key) == (pin_id, at):
                del self._index[key]
        self._pages -= len(pin.keys)
        self._unused_pages -= len(pin.keys)
        return [pin_id]
