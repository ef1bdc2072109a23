"""What all parts of one simulation share."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampd.perf.model import PerformanceModel
from ampd.recent_load import RecentLoad
from ampd.types import Slo
from planner.simulator.events import EventLoop
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.outcome import GapRun, Span
from planner.simulator.shared_prefixes import SessionPrefix


@dataclass(frozen=True, slots=True)
class World:
    """Time, laws and records of one simulation.

    Attributes:
        model: the times that passes, decode steps and transfers take.
        belief: the times that the policies predict with; may differ from `model`.
        slo: the targets of all rounds.
        gaps: gaps between tokens, in order of their end.
        spans: where the timeline is recorded; None: nowhere.
        prefixes: session id -> the prefix that it shares with others, of the sessions that do.
        load: where the rounds of the last minutes are recorded, for the pools policy; None: it reads no load.
    """

    loop: EventLoop
    model: PerformanceModel
    belief: PerformanceModel
    policies: Policies
    slo: Slo
    options: SimulationOptions
    gaps: list[GapRun]
    spans: list[Span] | None
    load: RecentLoad | None = None
    prefixes: dict[str, SessionPrefix] = field(default_factory=dict)
