"""Roles that never change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ampd.policies.base import PoolsSituation, RoleChange
from ampd.policies.registry import Policy, register


@register("pools", "static")
class StaticPools(Policy):
    """Leave every worker in the role that it was started with.

    Reads: nothing.

    Limits: a cluster whose load shifts between prefill and decode keeps the layout it was planned with.

    Example: `--pools static`
    """

    is_idle: ClassVar[bool] = True

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:  # noqa: ARG002
        return ()
