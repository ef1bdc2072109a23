"""Registers the switched policies: in the processes of a graph, and only there."""

from __future__ import annotations

from ampd.policies.registry import register
from benchmarks.switched import SwitchedBinding, SwitchedOrdering, SwitchedPools, SwitchedRouting, SwitchedSlicing

NAME = "switched"

register("binding", NAME)(SwitchedBinding)
register("routing", NAME)(SwitchedRouting)
register("ordering", NAME)(SwitchedOrdering)
register("slicing", NAME)(SwitchedSlicing)
register("pools", NAME)(SwitchedPools)
