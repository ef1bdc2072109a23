"""A prefill changes in what it should, and keeps everything else."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from ampd.types import PrefillTask, Slo

TASK = PrefillTask("t", "s", 10, 20, 1.5, Slo(2.0, 0.1), 3, True, True)


def test_each_field_of_the_task_differs_from_its_default() -> None:
    assert all(getattr(TASK, field.name) != field.default for field in fields(PrefillTask))


@pytest.mark.parametrize(("hist_tokens", "incr_tokens"), [(0, 30), (29, 1)])
def test_other_tokens_change_nothing_else(hist_tokens: int, incr_tokens: int) -> None:
    changed = TASK.with_tokens(hist_tokens, incr_tokens)
    assert changed == replace(TASK, hist_tokens=hist_tokens, incr_tokens=incr_tokens)


def test_a_task_is_postponed_by_one() -> None:
    assert TASK.postponed() == replace(TASK, postponements=4)
