"""A workload and questions about the load that one replica of a small cluster carries."""

from ampd.perf.presets import analytic_model
from ampd.types import Parallelism, Slo
from planner.layout.capacity import Phase, Question
from planner.simulator.options import SimulationOptions
from workloads.generate import Lengths, generate

MODEL = analytic_model("llama-3.1-8b", "h20")
SLO = Slo(0.3, 0.02)
SESSIONS = tuple(generate("toolbench", 100, 1.0, 0, Lengths.PER_SESSION))


def question(phase: Phase, degree: int) -> Question:
    capacity = MODEL.kv_capacity_tokens(Parallelism(degree)) or 0
    return Question(phase, degree, SESSIONS, MODEL, "fcfs", "whole", SLO, SimulationOptions(), capacity)
