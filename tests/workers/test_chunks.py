"""Tasks as they come over the wire."""

from typing import Any

from ampd.types import PrefillTask, Slo
from workers.chunks import task_from_wire


def test_a_task_counts_back_from_its_arrival_here() -> None:
    message: Any = {
        "task_id": "t",
        "session_id": "s",
        "hist_tokens": 30,
        "incr_tokens": 12,
        "waited_s": 0.5,
        "ttft_s": 1.0,
        "itl_s": 0.1,
    }
    task = PrefillTask("t", "s", 30, 12, 9.5, Slo(1.0, 0.1))
    assert task_from_wire(message, 10.0) == task
    assert task_from_wire({**message, "session_missed": True}, 10.0).session_missed
