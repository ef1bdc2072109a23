"""A workload, and a case that is planned in moments."""

from ampd.perf.presets import analytic_model
from ampd.types import Slo
from planner.layout.layout import PlanCase
from planner.simulator.options import SimulationOptions
from workloads.trace import Round, Session
from workloads.trace_command import Lengths, generate

MODEL = analytic_model("llama-3.1-8b", "h20")
SLO = Slo(0.3, 0.02)
SESSIONS = tuple(generate("toolbench", 100, 1.0, 0, Lengths.PER_SESSION))

ROUNDS = (Round(incr_tokens=60, output_tokens=3), Round(incr_tokens=20, output_tokens=2, tool_s=1.0))
CASE = PlanCase(
    sessions=tuple(Session(session_id=f"s{number}", arrival_s=number, rounds=ROUNDS) for number in range(5)),
    rate=2.0,
    slo=SLO,
    model=MODEL,
    kv_capacity_tokens={1: 200_000, 2: 450_000},
    gpus=4,
    routing="always-remote",
    ordering="fcfs",
    slicing="whole",
    pools="static",
    options=SimulationOptions(),
)
