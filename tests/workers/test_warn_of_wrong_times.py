"""One line tells of an engine whose times have left its performance model for a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampd.perf.corrections import LOAD, PREFILL, STEP, CorrectedModel
from ampd.perf.presets import load_performance_model
from ampd.types import Parallelism
from workers.component import warn_of_wrong_times
from workers.settings import WorkerSettings


class Ends(Exception):  # noqa: N818
    """The time that is simulated is over."""


async def warned_s(ratios: dict[int, float], caplog: pytest.LogCaptureFixture, slow_from_s: float = 0.0) -> float:
    """When the warning comes while passes take `ratios` of their times, within 300 s; infinite: it does not come."""
    times, now_s = CorrectedModel(load_performance_model("tiny-cpu"), Parallelism()), 0.0
    settings = WorkerSettings(role="decode", engine="sglang", model=Path("/models/m"), perf="tiny-cpu", tp=1)

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        if now_s > 300.0:
            raise Ends
        for kind, ratio in ratios.items():
            model_s = seconds / len(ratios)
            predicted_s = model_s * (times.parallelism.factors.step if kind == STEP else 1.0)
            times.measured(kind, predicted_s, model_s * (ratio if now_s > slow_from_s else 1.0))

    try:
        await warn_of_wrong_times(times, settings, sleep)
    except Ends:
        return float("inf")
    finally:
        assert len(caplog.records) <= 1
    return now_s


async def test_a_minute_of_slow_steps_is_told_with_the_command(caplog: pytest.LogCaptureFixture) -> None:
    assert 60.0 <= await warned_s({STEP: 3.0}, caplog) <= 75.0
    (line,) = caplog.messages
    assert line.startswith("for a minute decode steps")
    assert "--perf tiny-cpu says" in line
    assert "ampd profile --engine sglang --model /models/m --tp 1 --output FILE" in line


async def test_the_minute_counts_from_when_the_times_leave_the_model(caplog: pytest.LogCaptureFixture) -> None:
    assert await warned_s({STEP: 0.3}, caplog, slow_from_s=100.0) > 160.0


@pytest.mark.parametrize("ratios", [{STEP: 1.8}, {PREFILL: 1.0, STEP: 0.6}, {LOAD: 3.0}])
async def test_times_within_a_factor_of_two_and_loads_are_not_told(
    ratios: dict[int, float], caplog: pytest.LogCaptureFixture
) -> None:
    assert await warned_s(ratios, caplog) == float("inf")
    assert not caplog.messages
