"""Which values of another process are refused, and how the error names the field."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ampd.state.checks import check_count, check_counts, check_duration, check_finite, check_text, checked
from ampd.types import PrefillTask, Role, Slo, WorkerView

TASK = PrefillTask("t", "s", 16, 32, -5.0, Slo(1.0, 0.1))
VIEW = WorkerView("w", Role.PREFILL, queue=(TASK,), held_tokens={"s": 16})


def test_what_the_types_ask_for_is_returned() -> None:
    assert checked(VIEW) is VIEW
    assert checked(TASK) is TASK, "an arrival may lie before the clock's origin"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(VIEW, worker_id=7), "worker_id is no text"),  # type: ignore[arg-type]
        (replace(VIEW, held_tokens={"s": -1}), "held_tokens is no whole number"),
        (replace(VIEW, held_tokens={"s": 1.5}), "held_tokens is no table"),  # type: ignore[dict-item]
        (replace(VIEW, held_tokens=["s"]), "held_tokens is no table"),  # type: ignore[arg-type]
        (replace(VIEW, queue=(replace(TASK, incr_tokens=-1),)), "queue incr_tokens is no whole number"),
        (replace(TASK, arrival_s=math.nan), "arrival_s is no finite number"),
        (replace(TASK, slo=Slo(-1.0, 0.1)), "slo ttft_s is negative"),
        (replace(TASK, session_missed=1), "session_missed is neither"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_field_is_named(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        checked(wrong)


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (check_count, True),
        (check_count, 1 << 54),
        (check_finite, 10**400),
        (check_finite, "1"),
        (check_duration, -0.1),
        (check_text, "x" * 8193),
        (check_text, b"x"),
        (check_counts, {"a": 1 << 54}),
    ],
)
def test_nonsense_is_refused(check: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match="is "):
        check(wrong)
