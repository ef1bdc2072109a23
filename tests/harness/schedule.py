"""Which tests run in which process, if a run has several (`pytest -n 2`).

The tests of a file share a graph, so they stay together. All files that share the session's pair of SGLang engines
stay together, too, because a second pair would cost more than it saves. Tests of other engines are no part of that:
one after the other in one process, they would take half of the whole run.
"""

from __future__ import annotations

from collections import Counter

import pytest
from xdist.scheduler import LoadScopeScheduling

_OF_THE_PAIR = frozenset(f"test_sglang_{name}.py" for name in ("kv", "room", "weights"))
PAIR = "SGLang's pair"
"""The tests that use the fixture `pair`."""


def scope_of(test: str) -> str:
    """The tests with which it stays in one process. `test` is pytest's name of it: file, colons, function."""
    file = test.partition("::")[0]
    return PAIR if file.rpartition("/")[2] in _OF_THE_PAIR else file


def slowest_first(tests: list[pytest.Item]) -> None:
    """Sort them so that the scopes with the most slow tests begin, because none should be left alone at the end.

    Scopes with engines begin first: a test of them takes as long as many others.
    """
    slow = Counter(scope_of(test.nodeid) for test in tests if _is_slow(test))
    tests.sort(key=lambda test: (not _has_engines(test), -slow[scope_of(test.nodeid)]))


def _has_engines(test: pytest.Item) -> bool:
    return test.path.name.startswith("test_sglang")


def _is_slow(test: pytest.Item) -> bool:
    return any(test.get_closest_marker(name) for name in ("slow", "long"))


class ByScope(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each process one scope after the other, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
