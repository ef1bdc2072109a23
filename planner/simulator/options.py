"""The policies and options of a simulation, and what all of its parts share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from ampd.page_keys import PAGE_TOKENS
from ampd.perf.corrections import CorrectedModel
from ampd.perf.model import PerformanceModel
from ampd.policies import defaults
from ampd.policies.base import BindingPolicy, OrderingPolicy, PoolsPolicy, RoutingPolicy, SlicingPolicy
from ampd.policies.pools.static import StaticPools
from ampd.policies.slicing.whole import WholeSlicing
from ampd.recent_load import RecentLoad
from ampd.serving.roles import POOLS_INTERVAL_S
from ampd.types import WINDOW_S, Moves, Parallelism, Slo
from planner.simulator.events import EventLoop
from planner.simulator.outcome import GapRun, Span
from planner.simulator.shared_prefixes import SessionPrefix

_WHOLE = WholeSlicing()
_STATIC = StaticPools()


@dataclass(frozen=True, slots=True)
class Policies:
    """The policy objects of a run: the same classes as in the live graph, from the registry."""

    binding: BindingPolicy
    routing: RoutingPolicy
    ordering: OrderingPolicy
    slicing: SlicingPolicy = _WHOLE
    pools: PoolsPolicy = _STATIC


@dataclass(frozen=True, slots=True)
class UnderWay:
    """How far a session is when its first round of the simulation arrives.

    Attributes:
        context_tokens: before that round.
        owner: id of the worker that it belongs to, whatever its role is; "": it is placed where the least KV is.
        prefill: id of the worker in whose queue the round is already; "": it is routed.
        waited_s: time since the round was sent.
        is_idle: it is between two rounds until then. Its KV is there from the beginning, and may be evicted. Idle
            sessions are listed in the order of their last use.
    """

    context_tokens: int
    owner: str = ""
    prefill: str = ""
    waited_s: float = 0.0
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """How the cluster behaves; the defaults are those of the live workers.

    Attributes:
        seed: of the policies' random choices; the same seed gives the same result.
        window_s: length of the windows of TTFT and ITL.
        page_size_tokens: KV is held and moved in whole pages of this size.
        dispatch_s: from the client's request to the entry in a queue (frontend, coordinator, one hop).
        hand_over_s: from the first token at a prefill worker to the decode worker's read of the increment.
        kv_read_s: time of a KV read apart from the transfer (finding the pages at the peer).
        hand_over_pass: the last tokens of a round that was prefilled elsewhere take a prefill pass of their own at the
            decode worker (as in SGLang); else the next decode step computes them.
        state_delay_s: longest time until coordinators see a change at a worker. Each coordinator knows its own
            decisions at once.
        coordinators: replicas. Each round goes to a random one.
        pools_interval_s: how often the pools policy is asked.
        pools_answer_s: time that a slow pools policy takes to answer. Its changes are made then, and it rests as in a
            live graph.
        max_wait: longest predicted wait of a round in TTFT targets (`ampd.serving.admission`). A refused round comes
            back after the time that its refusal names. 0: no round is refused.
        moves: which sessions may move to another owner between two rounds (`ampd.serving.moves`).
        knows_prefixes: decisions know the prefixes that workers hold for several sessions. False shows the gain,
            because the KV is shared all the same.
        corrects_times: workers correct wrong times by what they measure. False shows the gain.
        under_way: session id -> how far it is, of the sessions that are under way when the simulation begins.
        gaps_from_s: virtual time from which the gaps between tokens are recorded.
        until_s: virtual time at which the simulation stops, whatever is under way.
        keeps_timeline: record the activities of every worker with their times, for reports.
    """

    seed: int = 0
    window_s: float = WINDOW_S
    page_size_tokens: int = PAGE_TOKENS
    dispatch_s: float = 0.0
    hand_over_s: float = 0.0
    kv_read_s: float = 0.0
    hand_over_pass: bool = True
    state_delay_s: float = 0.0
    coordinators: int = 1
    pools_interval_s: float = POOLS_INTERVAL_S
    pools_answer_s: float = 0.0
    max_wait: float = 0.0
    moves: Moves = defaults.MOVES
    knows_prefixes: bool = True
    corrects_times: bool = True
    under_way: Mapping[str, UnderWay] = field(default_factory=dict)
    gaps_from_s: float = 0.0
    until_s: float = inf
    keeps_timeline: bool = False


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

    def times_of(self, parallelism: Parallelism) -> CorrectedModel | None:
        """The corrected times of a new worker; None: nothing is measured, because no factor could become another."""
        is_right = self.belief is self.model
        return None if is_right or not self.options.corrects_times else CorrectedModel(self.belief, parallelism)
