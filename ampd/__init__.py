"""The shared core: types, configuration, performance model, policies, shared state and the `ampd` command.

The Python API (docs/api.md) is imported when it is first asked for, because processes of a graph need none of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ampd import compiled

if TYPE_CHECKING:
    from planner.api import PlanResult, RunResult, Session, UserError, load_result, load_trace, plan, simulate

__all__ = ["PlanResult", "RunResult", "Session", "UserError", "load_result", "load_trace", "plan", "simulate"]

compiled.install()


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("planner.api"), name)
    raise AttributeError(f"module 'ampd' has no attribute {name!r}")
