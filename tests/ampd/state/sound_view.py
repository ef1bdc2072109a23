"""A view that every part of the shared state accepts."""

from ampd.types import PrefillTask, Role, Slo, Window, WorkerView


def sound_view() -> WorkerView:
    task = PrefillTask("t1", "s1", 0, 5, 1.0, Slo(1.0, 0.1))
    return WorkerView("w1", Role.DECODE, queue=(task,), ttft=Window(0.5, 3), held_tokens={"s": 16})
