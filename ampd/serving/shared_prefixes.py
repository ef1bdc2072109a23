"""Prefixes that several sessions share: which of a prompt's first tokens a worker holds for other sessions.

Agents of one kind begin with the same system prompt. Its KV is held once, by the keys of its pages, and every session
finds it. A worker publishes the prefixes that two or more of its sessions have used (`WorkerView.shared_prefixes`), so
that decisions know them too: a prefix by the key of its last page, with its tokens.

What a worker holds of a round's prompt is the longer of two parts: of the session's own context, and of a shared
prefix. Workers, coordinators and the simulator take these rules from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ampd.types import PrefillTask, WorkerView, usable_tokens

MOST_PUBLISHED = 64
"""Shared prefixes that a view lists, those used last. They take about 2 kB."""

_LEAST_USERS = 2
"""Sessions that use a prefix from the moment on at which it is shared."""

_KEY_BYTES = 8
"""Two prefixes with the same 64 bits would make an estimate wrong, and never a token."""


def prefix_key(page_key: bytes) -> str:
    """The published name of the prefix that ends with a page.

    Args:
        page_key: see `ampd.keys`. It depends on the tenant, so that a tenant finds none of another's prefixes.
    """
    return page_key[:_KEY_BYTES].hex()


class PrefixUsers:
    """The sessions that have used a prefix, and how many of its first tokens or pages each has used."""

    __slots__ = ("_used",)

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        """Of the two sessions that used the most: a third session has used no more than one of them."""

    def note(self, session_id: str, used: int) -> None:
        """A session uses the first `used` tokens or pages."""
        self._used[session_id] = max(used, self._used.get(session_id, 0))
        if len(self._used) > _LEAST_USERS:
            del self._used[min(self._used, key=self._used.__getitem__)]

    def shared(self, session_id: str, used: int) -> int:
        """How many of the first `used` tokens or pages another session has used too."""
        return min(used, max([most for name, most in self._used.items() if name != session_id], default=0))

    @property
    def is_shared(self) -> bool:
        """Whether two sessions have used it. The end of the sessions does not matter."""
        return len(self._used) >= _LEAST_USERS


def published(workers: Iterable[WorkerView]) -> dict[str, int]:
    """Key -> tokens of all prefixes that workers publish."""
    found: dict[str, int] = {}
    for worker in workers:
        if worker.shared_prefixes:
            found.update(worker.shared_prefixes)
    return found


def shared_tokens(prompt: Mapping[str, int], workers: Iterable[WorkerView]) -> dict[str, int]:
    """How much of a prompt each worker holds for other sessions.

    Args:
        prompt: key of a prefix -> how many of its tokens the prompt begins with.

    Returns:
        Worker id -> tokens, without the workers that hold none.
    """
    found = {}
    for worker in workers:
        there = worker.shared_prefixes
        if there and (common := there.keys() & prompt.keys()):
            found[worker.worker_id] = max(min(there[key], prompt[key]) for key in common)
    return found


def with_shared(task: PrefillTask, tokens: int) -> PrefillTask:
    """The prefill at a worker that holds the prompt's first `tokens`."""
    hist_tokens = usable_tokens(tokens, task.context_tokens)
    if hist_tokens <= task.hist_tokens:
        return task
    return task.with_tokens(hist_tokens, task.context_tokens - hist_tokens)


def reads_history(task: PrefillTask, shared_tokens: int) -> bool:
    """Whether a prefill has history to read: more than its worker holds for other sessions."""
    return task.hist_tokens > shared_tokens
