"""The sessions of a KV store: which pages each of them needs, whose pages go first, and which prefixes they share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from ampd.serving.shared_prefixes import MOST_PUBLISHED, prefix_key
from workers.kv.store.runs import Claimant, PageRun, PageSpan, PrefixRecords, RunTable

_MOST_CLOSED_SESSIONS = 4096

Surplus = Callable[[int, str], int]
"""(context tokens, session id) -> how many of the last tokens may be missing when the session's next round starts."""


@dataclass(slots=True, eq=False)
class _Session(Claimant):
    """A session. Its context is what `path` covers, followed by `missing`.

    Attributes:
        running: requests that have begun and not ended.
        missing: keys of the rest of its context. The rest begins with the first page that is neither stored nor being
            written.
        floor_pages: what must stay of the context so that the next round meets its target; None: not computed yet.
    """

    id: str = ""
    running: int = 0
    missing: list[bytes] = field(default_factory=list)
    floor_pages: int | None = None

    @property
    def context_pages(self) -> int:
        return sum(self.path.values()) + len(self.missing)


class SessionTable:
    """Sessions in the order of their use, with the pages that each needs. See `StoreDirectory`.

    The context of a session is the one that its last request began or ended with. The session needs the longest prefix
    of this context that is stored or being written, and no other pages:

    - Pages behind a hole in the context cannot be used until the hole is filled. They are the first to go. A hole
      appears when the end of a context leaves the store while the device keeps it, or when a page finds no room.
    - Pages of another context (the output of a request that has not ended, an older context, a request that runs beside
      the last one) belong to no session until a request ends with them.

    Args:
        runs: what is in the store.
        page_size: tokens per page.
        attention_windows: of the pools that have no record of every page; see `PrefixRecords`.
        surplus: None: no tokens may be missing.

    Attributes:
        shared: the prefixes that several sessions have used.
    """

    def __init__(
        self, runs: RunTable, page_size: int, attention_windows: Mapping[str, int], surplus: Surplus | None
    ) -> None:
        self._runs = runs
        self._page_size = page_size
        self._attention_windows = attention_windows
        self._surplus = surplus
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self.shared = SharedPrefixes(page_size, attention_windows)
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._with_surplus: OrderedDict[str, None] = OrderedDict()
        self._changed: dict[str, None] = {}

    # -- what they hold

    def held_tokens(self, session_id: str) -> int:
        """Tokens of a session's latest context that can be restored here."""
        session = self._sessions.get(session_id)
        return self._records(session).longest() * self._page_size if session else 0

    def take_changed(self) -> dict[str, int]:
        """Sessions whose held tokens may have changed since the last call, with what they hold now."""
        changed = {session_id: self.held_tokens(session_id) for session_id in self._changed}
        self._changed.clear()
        return changed

    def note_changed(self, runs: Iterable[PageRun]) -> None:
        """Records of these runs were added or removed."""
        for run in runs:
            self._changed.update((claimant.id, None) for claimant in run.claims if isinstance(claimant, _Session))

    # -- what they do

    def begin_request(self, session_id: str, keys: Sequence[bytes], *, is_copy: bool = False) -> None:
        """`touch` the session and protect it until its last `end_request`; reopens a released one.

        Args:
            is_copy: another worker owns the session. Its pages here are evicted before the sessions of this worker, and
                do not count as memory that sessions use.
        """
        self._closed.pop(session_id, None)
        session = self._known(session_id)
        session.running += 1
        if session.is_copy != is_copy:
            self._runs.set_kind(session, protects=session.protects, is_copy=is_copy)
        self.touch(session_id, keys)

    def end_request(self, session_id: str, keys: Sequence[bytes]) -> None:
        """The counterpart of `begin_request`, with the present context. A released session stays released."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.running = max(0, session.running - 1)
            self.touch(session_id, keys)

    def touch(self, session_id: str, keys: Sequence[bytes]) -> None:
        """Set the session's context to `keys`."""
        session = self._known(session_id)
        self._note_use(session)
        spans = list(self._runs.spans(keys, written_only=False))
        self.shared.used(session_id, spans)
        path = {span.run: span.at + span.pages for span in spans}
        self._runs.set_path(session, path)
        session.missing = list(keys[sum(path.values()) :])
        if session.protects != (session.running > 0):
            self._runs.set_kind(session, protects=session.running > 0, is_copy=session.is_copy)
        for _, span in self._runs.stretches(session.missing):
            self._runs.evict_first(span.run)

    def extend(self, session_id: str, keys: Sequence[bytes]) -> bool:
        """Pages `keys` have come. The session now needs the pages that follow its own pages without a hole.

        Returns:
            Whether these pages lie behind a hole in the session's context.
        """
        session = self._sessions.get(session_id)
        if session is None:
            return False
        self._note_use(session)
        found = list(self._runs.spans(session.missing, written_only=False))
        self._runs.claim_spans(session, found)
        del session.missing[: sum(span.pages for span in found)]
        return bool(keys) and keys[0] in session.missing

    def release_session(self, session_id: str) -> None:
        """Forget a session. Its records stay until memory is needed.

        Records that the engine still offers for it are refused until a request begins.
        """
        self._closed[session_id] = None
        self._closed.move_to_end(session_id)
        if len(self._closed) > _MOST_CLOSED_SESSIONS:
            self._closed.popitem(last=False)
        self._forget(session_id)

    def is_released(self, session_id: str) -> bool:
        """Whether a session was released and has begun nothing since."""
        return session_id in self._closed

    def lose(self, run: PageRun) -> None:
        """A run is about to be forgotten. Its sessions no longer need it, nor the pages behind it in their contexts."""
        for session in [claimant for claimant in run.claims if isinstance(claimant, _Session)]:
            self._changed[session.id] = None
            path = list(session.path.items())
            lost = path[list(session.path).index(run) :]
            session.missing[:0] = [key for of, pages in lost for key in of.keys[:pages]]
            for of, _ in reversed(lost):
                self._runs.claim(session, of, 0)

    # -- whose pages go

    def evict_surplus(self, pages: int) -> int:
        """Drop up to `pages` pages from the end of an idle session that can lose them without harm; returns how many.

        First comes the session that has been idle for longest. 0: no session has pages to spare.
        """
        while self._with_surplus:
            session_id = next(iter(self._with_surplus))
            session = self._sessions[session_id]
            if not session.protects:
                if session.floor_pages is None:
                    session.floor_pages = self._floor_pages(session)
                if dropped := self._trim(session, session.floor_pages, pages):
                    return dropped
            del self._with_surplus[session_id]
        return 0

    def evict_idle(self, pages: int) -> int:
        """Drop up to `pages` pages from the end of an idle session; returns how many.

        Copies come before sessions of this worker. Of either kind the least recently used comes first. A session that
        has lost its last page is released: what the engine still offers of it lies behind a hole. A session whose pages
        are all shared is forgotten. If pages of it come later, they belong to no session.
        """
        for session in sorted(self._sessions.values(), key=lambda session: not session.is_copy):
            if session.protects:
                continue
            dropped = self._trim(session, 0, pages)
            last = next(reversed(session.path), None)
            if dropped and last is None:
                self.release_session(session.id)
            elif not dropped and (last is None or last.is_shared(session.path[last])):
                self._forget(session.id)
            if dropped:
                return dropped
        return 0

    def _trim(self, session: _Session, floor_pages: int, pages: int) -> int:
        """Drop up to `pages` pages at a session's end that no other session needs, but not its first `floor_pages`."""
        last = next(reversed(session.path), None)
        if last is None:
            return 0
        claimed = session.path[last]
        spare = sum(session.path.values()) - floor_pages
        keep = max(last.needed_pages(besides=session), claimed - pages, claimed - spare)
        if keep >= claimed:
            return 0
        self._changed[session.id] = None
        session.missing[:0] = last.keys[keep:claimed]
        self._runs.claim(session, last, keep)
        return self._runs.cut(last, keep)

    def _floor_pages(self, session: _Session) -> int:
        """The shortest restorable length that still lets the next round compute the rest within its target."""
        if self._surplus is None:
            return session.context_pages
        context_tokens = session.context_pages * self._page_size
        floor = -(-(context_tokens - self._surplus(context_tokens, session.id)) // self._page_size)
        if floor <= 0:
            return 0
        lengths = takewhile(lambda pages: pages >= floor, self._records(session).restorable_lengths())
        return min(lengths, default=session.context_pages)

    # -- inside

    def _records(self, session: _Session) -> PrefixRecords:
        written = takewhile(lambda item: item[0].ready, session.path.items())
        return PrefixRecords([PageSpan(run, 0, pages) for run, pages in written], self._attention_windows)

    def _known(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = _Session(protects=False, is_session=True, id=session_id)
        return session

    def _note_use(self, session: _Session) -> None:
        self._sessions.move_to_end(session.id)
        self._changed[session.id] = None
        session.floor_pages = None
        if self._surplus is not None:
            self._with_surplus[session.id] = None
            self._with_surplus.move_to_end(session.id)

    def _forget(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._changed[session_id] = None
            self._with_surplus.pop(session_id, None)
            self._runs.release(session)


class SharedPrefixes:
    """The longest prefixes that two sessions have in common; the least recently used are forgotten first.

    A prefix counts from the moment at which a second session uses it, until its records are gone. The end of the
    sessions does not matter.

    Args:
        attention_windows: as those of `PrefixRecords`.
    """

    def __init__(self, page_size: int, attention_windows: Mapping[str, int]) -> None:
        self._page_size = page_size
        self._attention_windows = attention_windows
        self._spans: OrderedDict[tuple[PageRun, int], Sequence[PageSpan]] = OrderedDict()

    def used(self, session_id: str, spans: Iterable[PageSpan]) -> None:
        """Note that a session's context begins with these spans, and how far another session has used them too."""
        shared: list[PageSpan] = []
        is_whole = True
        for span in spans:
            pages = span.run.users.shared(session_id, span.pages)
            span.run.users.note(session_id, span.pages)
            if is_whole and pages:
                shared.append(PageSpan(span.run, 0, pages))
            is_whole = is_whole and pages == span.pages
        if shared:
            end = shared[-1].run, shared[-1].pages
            self._spans[end] = shared
            self._spans.move_to_end(end)
            if len(self._spans) > MOST_PUBLISHED:
                self._spans.popitem(last=False)

    def published(self) -> dict[str, int]:
        """Key -> tokens of the shared prefixes that can be restored now."""
        found: dict[str, int] = {}
        for end, spans in list(self._spans.items()):
            if spans[0].run.dropped or not spans[0].run.keys:
                del self._spans[end]
                continue
            records = PrefixRecords(list(_there(spans)), self._attention_windows)
            if pages := records.longest():
                found[prefix_key(records.key(pages - 1))] = pages * self._page_size
        return found


def _there(spans: Sequence[PageSpan]) -> Iterator[PageSpan]:
    """The part of a prefix that is still here: runs lose pages at their end, or go."""
    for span in spans:
        run = span.run
        if run.dropped or not run.ready:
            return
        pages = min(span.pages, len(run.keys))
        if pages:
            yield PageSpan(run, 0, pages)
        if pages < span.pages:
            return
