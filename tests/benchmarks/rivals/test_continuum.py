"""Sessions that run already go first."""

import random

from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.policies.registry import create
from ampd.types import Parallelism, PrefillTask, Slo
from tests.ampd.policies import situations

MODEL = load_performance_model("tiny-cpu")
CONTINUUM = create("ordering", "continuum")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_first_task_with_history_runs_and_overtakes_what_is_before_it(histories: list[int]) -> None:
    queue = [PrefillTask(str(n), str(n), hist, 10, 0.0, Slo(1, 1)) for n, hist in enumerate(histories)]
    pick = situations.pick(CONTINUUM, queue, Parallelism(), MODEL, 1.0, random.Random(0))
    running = [position for position, hist in enumerate(histories) if hist]
    assert pick.index == (running[0] if running else 0)
    assert pick.postponed == tuple(range(pick.index))
