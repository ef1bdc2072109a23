"""Finding the graph to look at, and reading it: all that `ampd top` asks of the world."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime

from ampd.cli.serve.announce import RunningGraph, running_graphs
from ampd.cli.serve.settings import EMBEDDED
from ampd.cli.top.settings import TopSettings
from ampd.cli.top.snapshot import Snapshot, look
from ampd.errors import UserError
from ampd.graph_settings import GraphSettings
from ampd.perf.model import PerformanceModel
from ampd.perf.piecewise import load_performance_model
from ampd.state import open_store
from ampd.state.store import StateStore, StateUnavailableError

PROG = "ampd top"


@dataclass(frozen=True, slots=True)
class Target:
    """The graph to look at.

    Attributes:
        is_guessed: nobody named its shared state, and no graph of that namespace runs here.
        others: the namespaces of the graphs that run here then.
    """

    state_url: str
    namespace: str
    model: PerformanceModel | None
    is_guessed: bool = False
    others: tuple[str, ...] = ()


def find_target(settings: TopSettings) -> Target:
    """The graph that the settings name, or the one that `ampd serve` runs on this machine.

    Raises:
        UserError: several run here, or the performance model is not there.
    """
    model = load_performance_model(settings.perf) if settings.perf else None
    default = GraphSettings.model_fields
    namespace = settings.namespace or str(default["namespace"].default)
    if settings.state_url not in (None, EMBEDDED):
        return Target(str(settings.state_url), namespace, model)
    running = running_graphs()
    here = [graph for graph in running if settings.namespace in (None, graph.namespace)]
    if not here:
        others = tuple(sorted({graph.namespace for graph in running}))
        return Target(str(default["state_url"].default), namespace, model, is_guessed=True, others=others)
    if len(here) > 1:
        raise UserError(f"{PROG}: several graphs run on this machine; choose one with {_choices(here)}")
    (graph,) = here
    return Target(graph.state_url, graph.namespace, model or _model_of(graph))


def _choices(graphs: list[RunningGraph]) -> str:
    return ", or ".join(f"--state-url {graph.state_url} ({graph.url}, namespace {graph.namespace})" for graph in graphs)


def _model_of(graph: RunningGraph) -> PerformanceModel | None:
    try:
        return load_performance_model(graph.perf)
    except UserError:
        return None  # its file has gone; nobody asked for a forecast


class Collector:
    """Reads one graph.

    Args:
        place: where its shared state is, without credentials.
    """

    def __init__(self, store: StateStore, place: str, namespace: str, model: PerformanceModel | None = None) -> None:
        self._store = store
        self._place = place
        self._namespace = namespace
        self._model = model

    @classmethod
    async def connect(cls, target: Target) -> Collector:
        """Open the shared state.

        Raises:
            UserError: it does not answer or refuses.
        """
        from ampd.state.redis_connection import without_secrets

        place = without_secrets(target.state_url)
        try:
            store = await open_store(target.state_url, target.namespace, clock=time.monotonic)
        except StateUnavailableError as error:
            raise UserError(f"{PROG}: {error}; {_how_to_mend(target)}") from None
        return cls(store, place, target.namespace, target.model)

    async def read(self) -> Snapshot:
        """Look once.

        Raises:
            StateUnavailableError: the shared state does not answer or refuses.
        """
        overview = await self._store.overview()
        taken_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        return look(overview, self._namespace, self._place, taken_at, time.monotonic(), self._model)

    async def close(self) -> None:
        """Let go of the shared state."""
        await self._store.close()


def _how_to_mend(target: Target) -> str:
    name = "name the graph's Redis with --state-url or AMPD_STATE_URL, as in redis://USER:PASSWORD@HOST:6379/0"
    if not target.is_guessed:
        return name
    if target.others:
        running = ", ".join(target.others)
        return f"no `ampd serve` of namespace {target.namespace} runs on this machine ({running} does): {name}"
    return f"no `ampd serve` runs on this machine: {name}"
