"""Roles that a test chooses, by the pools policy `from-file` of `tests.harness.scripted_coordinator`."""

import json

from ampd.types import Role, WorkerView
from tests.harness.graph import Graph


def role_flags(graph: Graph) -> list[str]:
    """Of a scripted coordinator that assigns the roles of `assign`."""
    return ["--pools", f"from-file(path={graph.folder / 'wanted.json'})"]


def assign(graph: Graph, **roles: tuple[str, str]) -> None:
    """The role and label of each worker that the policy wants from now on."""
    fresh = graph.folder / "fresh.json"
    fresh.write_text(json.dumps(roles))
    fresh.rename(graph.folder / "wanted.json")


async def until_role(graph: Graph, worker_id: str, role: Role, label: str = "") -> None:
    """Wait until the worker has taken it."""

    def is_there(views: list[WorkerView]) -> bool:
        return (worker_id, role, label) in {(view.worker_id, view.role, view.label) for view in views}

    await graph.until_views(is_there)
