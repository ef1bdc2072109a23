"""The policies of a coordinator, and the performance model by which they predict."""

from __future__ import annotations

from dataclasses import dataclass

from ampd.perf.model import PerformanceModel
from ampd.perf.presets import load_performance_model
from ampd.policies import registry
from ampd.policies.base import BindingPolicy, PoolsPolicy, RoutingPolicy
from router.settings import CoordinatorSettings


@dataclass(frozen=True, slots=True)
class CoordinatorPolicies:
    """Made once per coordinator.

    Attributes:
        pools: changes the workers' roles while this replica leads; None: the roles never change.
    """

    binding: BindingPolicy
    routing: RoutingPolicy
    model: PerformanceModel
    pools: PoolsPolicy | None = None

    @classmethod
    def of(cls, settings: CoordinatorSettings) -> CoordinatorPolicies:
        """The policies and the model that the settings name.

        Raises:
            UserError: one of them does not exist, or its parameters are wrong.
        """
        binding = registry.create_named("binding", settings.binding)
        routing = registry.create_named("routing", settings.routing)
        pools = registry.create_named("pools", settings.pools)
        return cls(binding, routing, load_performance_model(settings.perf), pools)
