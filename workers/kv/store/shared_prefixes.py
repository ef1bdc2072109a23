"""Which prefixes of contexts several sessions have used, for the worker's view."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ampd.serving.shared_prefixes import MOST_PUBLISHED, prefix_key
from workers.kv.store.prefix_records import PrefixRecords
from workers.kv.store.runs import PageRun, PageSpan


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
