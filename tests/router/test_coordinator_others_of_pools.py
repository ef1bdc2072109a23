"""What a pools policy is told about the other policies of its graph."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ampd.policies.base import OtherPolicies, PoolsSituation, RoleChange
from ampd.policies.ordering.fcfs import Fcfs
from ampd.policies.slicing.whole import WholeSlicing
from ampd.settings import parse_settings
from router.coordinator import Coordinator
from router.policies import CoordinatorPolicies
from router.settings import CoordinatorSettings
from tests.memory_store import MemoryStore


@dataclass
class Listens:
    """A pools policy that changes nothing, and notes what it is told."""

    told: list[OtherPolicies] = field(default_factory=list)
    is_idle: bool = False
    is_slow: bool = False
    interval_s: float = 0.0
    load_s: float = 0.0

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        self.told.append(situation.others)
        return ()


async def test_a_pools_policy_is_told_all_policies_of_its_graph() -> None:
    """Also as a process of its own would be told, by a copy."""
    flags = ["--model=m", "--binding=predictive", "--routing=always-local", "--ordering=fcfs", "--slicing=whole"]
    settings = parse_settings(CoordinatorSettings, [*flags, "--perf", "tiny-cpu", "--moves", "any"], "python -m router")
    listens = Listens()
    policies = replace(CoordinatorPolicies.of(settings), pools=listens)
    coordinator = Coordinator(settings, None, MemoryStore(), policies)  # type: ignore[arg-type]
    await coordinator.start()
    assert coordinator.pools is not None
    await coordinator.pools.step()
    await coordinator.stop()
    others = listens.told[-1]
    assert (others.binding, others.routing) == (policies.binding, policies.routing)
    for known in (others, pickle.loads(pickle.dumps(others))):
        assert (type(known.ordering), type(known.slicing), known.moves) == (Fcfs, WholeSlicing, "any")
