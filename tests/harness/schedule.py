"""Which tests run in which process, if a run has several (`pytest -n 2`).

The tests of a file share a graph, so they stay together. All files that share the session's pair of SGLang engines
stay together, too, because a second pair would cost more than it saves.
"""

from __future__ import annotations

from collections import Counter

import pytest
from xdist.scheduler import LoadScopeScheduling


def scope_of(test: str) -> str:
    """The tests with which it stays in one process. `test` is pytest's name of it: file, colons, function."""
    file = test.partition("::")[0]
    return "SGLang's engines" if file.rpartition("/")[2].startswith("test_sglang") else file


def slowest_first(tests: list[pytest.Item]) -> None:
    """Sort them so that the scopes with the most slow tests begin, because none should be left alone at the end."""
    slow = Counter(scope_of(test.nodeid) for test in tests if _is_slow(test))
    tests.sort(key=lambda test: -slow[scope_of(test.nodeid)])


def _is_slow(test: pytest.Item) -> bool:
    return any(test.get_closest_marker(name) for name in ("slow", "long"))


class ByScope(LoadScopeScheduling):
    """Gives each process one scope after the other, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
