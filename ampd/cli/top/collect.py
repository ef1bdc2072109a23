"""Finds the graph to show and reads its shared state: the whole I/O of `ampd top`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ampd.cli.serve.local_graphs import LocalGraph, local_graphs
from ampd.cli.serve.settings import EMBEDDED
from ampd.cli.top.settings import TopSettings
from ampd.cli.top.snapshot import snapshot_of
from ampd.errors import UserError
from ampd.graph_settings import GraphSettings
from ampd.perf.model import PerformanceModel
from ampd.perf.presets import load_performance_model
from ampd.state import open_store
from ampd.state.redis_connection import without_secrets
from ampd.state.store import StateStore, StateUnavailableError

PROG = "ampd top"


@dataclass(frozen=True, slots=True)
class Target:
    """The graph to show.

    Attributes:
        model: predicts the wait in each queue; None: no prediction.
        hint: why this target is a guess, for the error if it does not answer; empty if it is none.
    """

    state_url: str
    namespace: str
    model: PerformanceModel | None = None
    hint: str = ""

    @property
    def place(self) -> str:
        """The shared state without credentials."""
        return without_secrets(self.state_url)


def find_target(settings: TopSettings) -> Target:
    """The graph that the settings name, or the one that `ampd serve` runs on this machine.

    Raises:
        UserError: several graphs run here, or the performance model does not exist.
    """
    model = load_performance_model(settings.perf) if settings.perf else None
    default = GraphSettings.model_fields
    namespace = settings.namespace or str(default["namespace"].default)
    if settings.state_url not in (None, EMBEDDED):
        return Target(str(settings.state_url), namespace, model)
    graphs = local_graphs()
    fitting = [graph for graph in graphs if settings.namespace in (None, graph.namespace)]
    if len(fitting) > 1:
        choices = (f"--state-url {graph.state_url} ({graph.url}, namespace {graph.namespace})" for graph in fitting)
        raise UserError(f"{PROG}: several graphs run on this machine; choose one with {', or '.join(choices)}")
    if fitting:
        return Target(fitting[0].state_url, fitting[0].namespace, model or _model_of(fitting[0]))
    hint = "no `ampd serve` runs on this machine: "
    if others := ", ".join(sorted({graph.namespace for graph in graphs})):
        hint = f"no `ampd serve` of namespace {namespace} runs on this machine ({others} does): "
    return Target(str(default["state_url"].default), namespace, model, hint)


def _model_of(graph: LocalGraph) -> PerformanceModel | None:
    try:
        return load_performance_model(graph.perf)
    except UserError:
        return None  # the file no longer exists, and the user did not ask for predictions


class Collector:
    """Reads one graph."""

    def __init__(self, store: StateStore, target: Target) -> None:
        self._store = store
        self._target = target

    @classmethod
    async def connect(cls, target: Target) -> Collector:
        """Open the shared state.

        Raises:
            UserError: it does not answer, or it refuses the connection.
        """
        try:
            return cls(await open_store(target.state_url, target.namespace, clock=time.monotonic), target)
        except StateUnavailableError as error:
            raise UserError(
                f"{PROG}: {error}; {target.hint}name the graph's Redis with --state-url or AMPD_STATE_URL, as in "
                "redis://USER:PASSWORD@HOST:6379/0"
            ) from None

    async def read(self) -> dict[str, Any]:
        """The snapshot of now, with the keys of docs/top.md#json.

        Raises:
            StateUnavailableError: the shared state does not answer, or it refuses the command.
        """
        overview = await self._store.overview()
        return {
            "taken_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "namespace": self._target.namespace,
            "state": self._target.place,
            **snapshot_of(overview, time.monotonic(), self._target.model),
        }

    async def close(self) -> None:
        await self._store.close()
