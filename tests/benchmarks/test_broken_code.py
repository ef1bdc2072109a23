from __future__ import annotations

import pytest

from benchmarks.broken_code import BREAKS, ROOT, Break


@pytest.mark.parametrize("each", BREAKS, ids=lambda each: each.rule)
def test_the_code_has_what_is_broken(each: Break) -> None:
    assert (ROOT / each.path).read_text("utf-8").count(each.old) == 1
    assert each.new != each.old
    assert all((ROOT / test).exists() for test in each.tests)
