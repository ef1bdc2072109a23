"""The policies of a coordinator, and the performance model by which they predict."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from ampd.perf.model import PerformanceModel
from ampd.perf.presets import load_performance_model
from ampd.policies import registry
from ampd.policies.base import BindingPolicy, OrderingPolicy, PoolsPolicy, RoutingPolicy, SlicingPolicy
from ampd.policies.naming import parse_named
from router.settings import PROG, CoordinatorSettings


@dataclass(frozen=True, slots=True)
class CoordinatorPolicies:
    """Made once per coordinator.

    Attributes:
        pools: changes the workers' roles while this replica leads; None: the roles never change.
        ordering, slicing: of the workers, for a pools policy; None: the default.
    """

    binding: BindingPolicy
    routing: RoutingPolicy
    model: PerformanceModel
    pools: PoolsPolicy | None = None
    ordering: OrderingPolicy | None = None
    slicing: SlicingPolicy | None = None

    @classmethod
    def of(cls, settings: CoordinatorSettings) -> CoordinatorPolicies:
        """The policies and the model that the settings name.

        Raises:
            UserError: one of them does not exist, or its parameters are wrong.
        """
        binding_params = _old_parameters("binding", settings.binding_params)
        binding = registry.create_named("binding", settings.binding, **binding_params)
        routing_params = _old_parameters("routing", settings.routing_params)
        routing = registry.create_named("routing", settings.routing, **routing_params)
        pools = registry.create_named("pools", settings.pools)
        ordering = registry.create_named("ordering", settings.ordering)
        slicing = registry.create_named("slicing", settings.slicing)
        return cls(binding, routing, load_performance_model(settings.perf), pools, ordering, slicing)


def _old_parameters(kind: str, text: str) -> dict[str, Any]:
    """The parameters that `--KIND-params` names, with a warning. The next version will not have them."""
    flag = f"--{kind}-params"
    _, parameters = parse_named(f"{flag}({text})")
    if parameters:
        print(f"{PROG}: {flag} will be removed in the next version; write --{kind} 'NAME({text})'", file=sys.stderr)
    return parameters
