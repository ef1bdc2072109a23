"""One look at a graph, as `ampd top` shows it and `--json` prints it: a pure function of what was read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ampd.errors import UserError
from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import queued_s
from ampd.state.store import Heard, Overview
from ampd.telemetry.coordinator_view import CoordinatorView
from ampd.telemetry.latencies import Latencies
from ampd.telemetry.served_window import ServedWindow, merged
from ampd.types import Role, Route, Slo, WorkerView

LARGEST_SESSIONS = 3


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Seconds; None without any. The mean is exact, the others are within 1 %."""

    count: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Attainment:
    """Shares of the rounds (abandoned ones left out) that met both targets, and each; None without any."""

    rounds: float | None
    ttft: float | None
    itl: float | None


@dataclass(frozen=True, slots=True)
class RouteCount:
    """Rounds that were prefilled there for that reason."""

    route: str
    reason: str
    rounds: int


@dataclass(frozen=True, slots=True)
class WindowRow:
    """The rounds that ended within the coordinators' window, all coordinators together.

    Attributes:
        length_s: of the window; `span_s`: as much of it as a coordinator has lived. Rates divide by it.
        rounds: all that ended; `abandoned` by their client and `errors` are among them.
        routes: rounds by route; `reasons`: by route and reason. Both sum to `rounds`.
    """

    length_s: float
    span_s: float
    rounds: int
    abandoned: int
    errors: int
    rounds_per_s: float | None
    output_tokens_per_s: float | None
    attainment: Attainment
    ttft_initial_s: LatencySummary
    ttft_incremental_s: LatencySummary
    itl_s: LatencySummary
    routes: dict[str, int]
    reasons: tuple[RouteCount, ...]
    sessions_bound: int
    sessions_repinned: int


@dataclass(frozen=True, slots=True)
class CoordinatorRow:
    """One coordinator.

    Attributes:
        age_s: since its last word.
        rounds, attainment, local_share: of its own window.
        is_leading: it assigns the workers' roles.
        is_state_heard: the shared state's events reach it; `state_losses`: times that they stopped.
    """

    coordinator_id: str
    age_s: float
    routing: str
    binding: str
    pools: str
    rounds_in_progress: int
    rounds: int
    attainment: float | None
    local_share: float | None
    is_leading: bool
    is_state_heard: bool
    state_losses: int


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker.

    Attributes:
        age_s: since its last word of its own; what others wrote of its queue since is laid over it.
        queue_prefills: prefills that wait or run there; `queue_tokens`: new tokens in them.
        queue_wait_s: how long a prefill that came now would wait for them, by the performance model; None without one.
        oldest_wait_s: since the round of the oldest of them arrived; None: there are none.
        ttft_s, itl_s: means of the worker's own window (`--window-s`); None: `ttft_rounds`, `itl_tokens` are 0.
        decode_batch: rounds that decode now; `decode_context_tokens`: their context.
        sessions_held: sessions whose KV it holds; `session_tokens`: of these, together.
    """

    worker_id: str
    age_s: float
    role: str
    lane: str
    tp: int
    queue_prefills: int
    queue_tokens: int
    queue_wait_s: float | None
    oldest_wait_s: float | None
    ttft_s: float | None
    ttft_rounds: int
    itl_s: float | None
    itl_tokens: int
    decode_batch: int
    decode_context_tokens: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    sessions_held: int
    session_tokens: int


@dataclass(frozen=True, slots=True)
class HeldSession:
    """A session whose KV a worker holds."""

    session_id: str
    worker_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class SessionsRow:
    """Sessions by what decode workers say that they hold: `held` counts each once, `tokens` sums over workers."""

    held: int
    tokens: int
    largest: tuple[HeldSession, ...]


@dataclass(frozen=True, slots=True)
class Targets:
    """The default latency targets of the coordinators, in seconds."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that `ampd top` knows at one moment.

    Attributes:
        taken_at: when, by this machine's clock: ISO 8601, UTC.
        state: where the shared state is, without credentials.
        oldest_word_s: age of the oldest word that is shown.
        slo: None without a coordinator.
        notes: what is wrong or missing, a line each.
    """

    taken_at: str
    namespace: str
    state: str
    oldest_word_s: float
    slo: Targets | None
    window: WindowRow
    coordinators: tuple[CoordinatorRow, ...]
    workers: tuple[WorkerRow, ...]
    sessions: SessionsRow
    notes: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nobody is alive."""
        return not self.workers and not self.coordinators

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return asdict(self)


def look(
    overview: Overview, namespace: str, state: str, taken_at: str, now_s: float, model: PerformanceModel | None = None
) -> Snapshot:
    """The snapshot of what was read at `now_s`, on the clock of the tasks' arrival times."""
    coordinators = sorted(overview.coordinators, key=lambda heard: heard.view.coordinator_id)
    workers = sorted(overview.workers, key=lambda heard: (heard.view.role, heard.view.lane, heard.view.worker_id))
    forecast = _Forecast(model)
    worker_rows = tuple(_worker(heard, now_s, forecast) for heard in workers)
    slo = _slo(coordinators)
    return Snapshot(
        taken_at=taken_at,
        namespace=namespace,
        state=state,
        oldest_word_s=max([*(heard.age_s for heard in coordinators), *(heard.age_s for heard in workers)], default=0.0),
        slo=slo,
        window=_window(merged(heard.view.window for heard in coordinators)),
        coordinators=tuple(map(_coordinator, coordinators)),
        workers=worker_rows,
        sessions=_sessions([heard.view for heard in workers]),
        notes=(*_notes(coordinators, workers), *forecast.notes),
    )


class _Forecast:
    """Predicts queues as far as the performance model goes, and notes how far that is."""

    def __init__(self, model: PerformanceModel | None) -> None:
        self._model = model
        self.notes: list[str] = []

    def __call__(self, view: WorkerView) -> float | None:
        if self._model is None:
            return None
        try:
            return queued_s(view, self._model)
        except UserError as error:
            note = f"no predicted wait: {error}"
            if note not in self.notes:
                self.notes.append(note)
            return None


def _slo(coordinators: Sequence[Heard[CoordinatorView]]) -> Targets | None:
    """The targets that most coordinators have."""
    targets = [heard.view.slo for heard in coordinators]
    if not targets:
        return None
    chosen = max(targets, key=targets.count)
    return Targets(chosen.ttft_s, chosen.itl_s)


def _window(window: ServedWindow) -> WindowRow:
    reasons = sorted(window.routes.items(), key=lambda item: (-item[1], item[0]))
    routes = {str(route): 0 for route in Route}
    for (route, _), rounds in reasons:
        routes[route] = routes.get(route, 0) + rounds
    return WindowRow(
        length_s=window.length_s,
        span_s=window.span_s,
        rounds=window.rounds,
        abandoned=window.abandoned,
        errors=window.failed,
        rounds_per_s=_share(window.rounds, window.span_s),
        output_tokens_per_s=_share(window.output_tokens, window.span_s),
        attainment=Attainment(
            rounds=_share(window.met, window.judged),
            ttft=_share(window.met_ttft, window.judged),
            itl=_share(window.met_itl, window.judged),
        ),
        ttft_initial_s=_summary(window.ttft_initial),
        ttft_incremental_s=_summary(window.ttft_incremental),
        itl_s=_summary(window.itl),
        routes=routes,
        reasons=tuple(RouteCount(route, reason, rounds) for (route, reason), rounds in reasons),
        sessions_bound=window.sessions_bound,
        sessions_repinned=window.sessions_repinned,
    )


def _summary(latencies: Latencies) -> LatencySummary:
    p50, p95, p99 = (latencies.quantile_s(share) for share in (0.5, 0.95, 0.99))
    return LatencySummary(latencies.count, latencies.mean_s, p50, p95, p99)


def _coordinator(heard: Heard[CoordinatorView]) -> CoordinatorRow:
    view, window = heard.view, heard.view.window
    local = sum(rounds for (route, _), rounds in window.routes.items() if route == Route.LOCAL)
    return CoordinatorRow(
        coordinator_id=view.coordinator_id,
        age_s=heard.age_s,
        routing=view.routing,
        binding=view.binding,
        pools=view.pools,
        rounds_in_progress=view.rounds_in_progress,
        rounds=window.rounds,
        attainment=_share(window.met, window.judged),
        local_share=_share(local, sum(window.routes.values())),
        is_leading=view.is_leading,
        is_state_heard=view.is_state_heard,
        state_losses=view.state_losses,
    )


def _worker(heard: Heard[WorkerView], now_s: float, forecast: _Forecast) -> WorkerRow:
    view = heard.view
    return WorkerRow(
        worker_id=view.worker_id,
        age_s=heard.age_s,
        role=str(view.role),
        lane=view.lane,
        tp=view.parallelism.tp,
        queue_prefills=len(view.queue),
        queue_tokens=sum(task.incr_tokens for task in view.queue),
        queue_wait_s=forecast(view),
        oldest_wait_s=max((max(now_s - task.arrival_s, 0.0) for task in view.queue), default=None),
        ttft_s=view.ttft.mean_s if view.ttft.count else None,
        ttft_rounds=view.ttft.count,
        itl_s=view.itl.mean_s if view.itl.count else None,
        itl_tokens=view.itl.count,
        decode_batch=view.decode_batch,
        decode_context_tokens=view.decode_context_tokens,
        kv_used_tokens=view.kv_used_tokens,
        kv_capacity_tokens=view.kv_capacity_tokens,
        sessions_held=len(view.held_tokens),
        session_tokens=sum(view.held_tokens.values()),
    )


def _sessions(workers: Iterable[WorkerView]) -> SessionsRow:
    held = [
        HeldSession(session_id, view.worker_id, tokens)
        for view in workers
        if view.role is Role.DECODE
        for session_id, tokens in view.held_tokens.items()
    ]
    largest = sorted(held, key=lambda one: (-one.tokens, one.session_id, one.worker_id))[:LARGEST_SESSIONS]
    return SessionsRow(len({one.session_id for one in held}), sum(one.tokens for one in held), tuple(largest))


def _notes(coordinators: Sequence[Heard[CoordinatorView]], workers: Sequence[Heard[WorkerView]]) -> Iterable[str]:
    if not workers and not coordinators:
        yield "nobody is alive in this namespace"
    if workers and not coordinators:
        yield "no coordinator is alive: no round can be served, and neither targets nor routes are known"
    if coordinators and not any(heard.view.role is Role.DECODE for heard in workers):
        yield "no decode worker is alive: every round is refused with 503"
    deaf = [heard.view.coordinator_id for heard in coordinators if not heard.view.is_state_heard]
    if deaf:
        yield f"without the shared state, deciding by what they heard last: coordinator {', '.join(deaf)}"
    slos: set[Slo] = {heard.view.slo for heard in coordinators}
    if len(slos) > 1:
        yield "the coordinators have different targets (--ttft, --itl); those of most of them are shown"


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
