"""What a simulation is of: the cluster, its policies, the options of the simulator, and virtual time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from typing import Any

from ampd.errors import UserError
from ampd.keys import PAGE_TOKENS
from ampd.perf.corrections import CorrectedModel
from ampd.perf.model import PerformanceModel
from ampd.policies import defaults
from ampd.policies.base import BindingPolicy, OrderingPolicy, PoolsPolicy, RoutingPolicy, SlicingPolicy
from ampd.policies.pools.static import StaticPools
from ampd.policies.slicing.whole import WholeSlicing
from ampd.serving.roles import POOLS_INTERVAL_S, prefill_at_start
from ampd.types import WINDOW_S, Moves, Parallelism, Role, Slo
from planner.simulator.outcome import GapRun, Span
from planner.simulator.shared_prefixes import SessionPrefix

_GROUP = re.compile(r"(\d{1,6})x(?:TP)?(\d{1,6})", re.IGNORECASE | re.ASCII)
_SEPARATOR = re.compile("[,+]")
"""Users write a comma. Plans and tables show a plus."""


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Equal worker replicas.

    Attributes:
        kv_capacity_tokens: KV memory of one replica; 0: unlimited.
        kv_store_tokens: host memory of one replica for sessions between rounds; 0: no store, they stay in KV memory.
    """

    replicas: int
    parallelism: Parallelism
    kv_capacity_tokens: int = 0
    kv_store_tokens: int = 0

    @property
    def gpus(self) -> int:
        return self.replicas * self.parallelism.tp

    def __str__(self) -> str:
        return f"{self.replicas}xTP{self.parallelism.tp}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A deployment. With decode workers only it is co-located: they do all the prefills of their sessions themselves.

    Attributes:
        max_context_tokens: longest context of the model; 0: unlimited.
    """

    decode: tuple[ReplicaGroup, ...]
    prefill: tuple[ReplicaGroup, ...] = ()
    max_context_tokens: int = 0
    mixed: tuple[ReplicaGroup, ...] = ()

    @property
    def groups(self) -> Mapping[Role, tuple[ReplicaGroup, ...]]:
        """The groups by role, in the order in which results list their workers."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}

    @property
    def gpus(self) -> int:
        return sum(group.gpus for groups in self.groups.values() for group in groups)

    @property
    def is_colocated(self) -> bool:
        return not self.prefill and not self.mixed

    def colocated(self) -> Cluster:
        """The same replicas, each with sessions of its own only, whose prefills it does itself."""
        every = [group for groups in self.groups.values() for group in groups]
        return replace(self, decode=merged(every), prefill=(), mixed=())

    def __str__(self) -> str:
        texts = {role: "+".join(map(str, groups)) for role, groups in self.groups.items() if groups}
        if self.is_colocated:
            return f"co-located {texts[Role.DECODE]}"
        return ", ".join(f"{role} {text}" for role, text in texts.items())


def merged(groups: Sequence[ReplicaGroup]) -> tuple[ReplicaGroup, ...]:
    """Equal replicas joined into one group, the smallest degree first."""
    replicas = Counter[tuple[int, int, int]]()
    for group in groups:
        replicas[group.parallelism.tp, group.kv_capacity_tokens, group.kv_store_tokens] += group.replicas
    return tuple(
        ReplicaGroup(count, Parallelism(tp), capacity, store)
        for (tp, capacity, store), count in sorted(replicas.items())
    )


def started(workers: Sequence[ReplicaGroup]) -> tuple[tuple[ReplicaGroup, ...], tuple[ReplicaGroup, ...]]:
    """(prefill, decode) replicas at the start of a cluster whose roles follow the load. The first ones prefill."""
    single = [replace(group, replicas=1) for group in workers for _ in range(group.replicas)]
    count = prefill_at_start(len(single))
    return merged(single[:count]), merged(single[count:])


def parse_groups(text: str, flag: str) -> tuple[tuple[int, Parallelism], ...]:
    """(replicas, parallelism) of a text such as `2xTP4`, `2xTP4,1xTP8`, or `2xTP4+1xTP8`; `0` or `none`: no group.

    Raises:
        UserError: the text does not fit; the line names `flag`.
    """
    if text.strip().lower() in ("", "0", "none"):
        return ()
    groups = [_GROUP.fullmatch(part.strip()) for part in _SEPARATOR.split(text)]
    pairs = [(int(match[1]), Parallelism(int(match[2]))) for match in groups if match]
    if len(pairs) < len(groups) or any(replicas < 1 or theta.tp < 1 for replicas, theta in pairs):
        raise UserError(f"{flag}: give replicas and their tensor parallelism as 2xTP4 or 2xTP4,1xTP8 (given: {text!r})")
    return tuple(pairs)


# -- virtual time: actions that run in the order of their times


class Once:
    """An action that is entered for several times. It runs at the first of them, unless it is cancelled before."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def __call__(self, _: object = None) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()

    def cancel(self) -> None:
        """Never run it."""
        self._action = None


class EventLoop:
    """Runs actions at their times; actions with equal times run in the order of their entry.

    Attributes:
        now_s: virtual time.
        handled: actions run so far.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.handled = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0

    def at(self, when_s: float, action: Callable[[Any], None], argument: Any = None) -> None:
        """Run `action(argument)` at a time that has not passed.

        An action cannot be cancelled: it checks on its own whether it is still due.

        Raises:
            ValueError: the time has passed, so that the effect would come before its cause.
        """
        if when_s < self.now_s:
            raise ValueError(f"it is {self.now_s} s, nothing can be done at {when_s} s any more")
        self._count += 1
        # No two have the same number, so actions are never compared.
        heappush(self._heap, (when_s, self._count, action, argument))

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Callable[[], None]:
        """Run `action()` after a delay, unless the returned function is called before."""
        once = Once(action)
        self.at(self.now_s + delay_s, once)
        return once.cancel

    def clock(self) -> float:
        """The virtual time, as a clock function."""
        return self.now_s

    def run(self, until_s: float = inf) -> None:
        """Run until no action is left, or only later ones than `until_s`."""
        heap = self._heap
        while heap:
            if heap[0][0] > until_s:
                return
            self.now_s, _, action, argument = heappop(heap)
            self.handled += 1
            action(argument)


# -- The policies and options of a simulation, and what all of its parts share

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
class SimulationOptions:
    """How the cluster behaves; the defaults are those of the live workers.

    Attributes:
        seed: of the policies' random choices; the same seed gives the same result.
        window_s: length of the windows of TTFT and ITL.
        page_size_tokens: KV is held and moved in whole pages of this size.
        dispatch_s: from the client's request to the entry in a queue (frontend, coordinator, one hop).
        hand_over_s: from the first token at a prefill worker to the decode worker's read of the increment.
        gpus_per_host: workers fill hosts of so many GPUs in their order (prefill, decode, mixed). Those of one host
            load each other's KV in place; 0: all KV goes over the network.
        kv_read_s: time of a KV read apart from the transfer (finding the pages at the peer).
        hand_over_pass: the last tokens of a round that was prefilled elsewhere take a prefill pass of their own at the
            decode worker (as in SGLang); else the next decode step computes them.
        state_delay_s: longest time until coordinators see a change at a worker. Each coordinator knows its own
            decisions at once.
        coordinators: replicas. Each round goes to a random one.
        pools_interval_s: how often the pools policy is asked.
        max_wait: longest predicted wait of a round in TTFT targets (`ampd.serving.admission`). A refused round comes
            back after the time that its refusal names. 0: no round is refused.
        moves: which sessions may move to another owner between two rounds (`ampd.serving.moves`).
        knows_prefixes: decisions know the prefixes that workers hold for several sessions. False shows the gain,
            because the KV is shared all the same.
        corrects_times: workers correct wrong times by what they measure. False shows the gain.
        idle_tokens: session id -> tokens of its context, of the sessions that are between two rounds when the
            simulation begins, in the order of their last use. Their KV is there from the beginning, on the workers
            that own the least KV, and may be evicted.
        gaps_from_s: virtual time from which the gaps between tokens are recorded.
        until_s: virtual time at which the simulation stops, whatever is under way.
        keeps_timeline: record the activities of every worker with their times, for reports.
    """

    seed: int = 0
    window_s: float = WINDOW_S
    page_size_tokens: int = PAGE_TOKENS
    dispatch_s: float = 0.0
    hand_over_s: float = 0.0
    gpus_per_host: int = 0
    kv_read_s: float = 0.0
    hand_over_pass: bool = True
    state_delay_s: float = 0.0
    coordinators: int = 1
    pools_interval_s: float = POOLS_INTERVAL_S
    max_wait: float = 0.0
    moves: Moves = defaults.MOVES
    knows_prefixes: bool = True
    corrects_times: bool = True
    idle_tokens: Mapping[str, int] = field(default_factory=dict)
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
    """

    loop: EventLoop
    model: PerformanceModel
    belief: PerformanceModel
    policies: Policies
    slo: Slo
    options: SimulationOptions
    gaps: list[GapRun]
    spans: list[Span] | None
    prefixes: dict[str, SessionPrefix] = field(default_factory=dict)

    def times_of(self, parallelism: Parallelism) -> CorrectedModel | None:
        """The corrected times of a new worker; None: nothing is measured, because no factor could become another."""
        is_right = self.belief is self.model
        return None if is_right or not self.options.corrects_times else CorrectedModel(self.belief, parallelism)
