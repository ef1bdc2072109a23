"""Questions about the load that one replica carries."""

from ampd.types import Parallelism
from benchmarks.paper_plan.load_curves import Phase, Question
from planner.simulator.options import SimulationOptions
from tests.planner.layout.lab import MODEL, SESSIONS, SLO


def question(phase: Phase, degree: int) -> Question:
    capacity = MODEL.kv_capacity_tokens(Parallelism(degree)) or 0
    return Question(phase, degree, SESSIONS, MODEL, "fcfs", "whole", SLO, SimulationOptions(), capacity)
