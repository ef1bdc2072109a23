"""The coordinator's metrics: counted at the end of each round, and read from its state at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampd.state.redis_store import StateStore
from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.exposition import Counter, Histogram, LabelValues, Reading
from ampd.types import Role
from router.decision_record import DecisionRecord

if TYPE_CHECKING:
    from router.coordinator import Coordinator
    from router.frames import FrameServer
    from router.settings import CoordinatorSettings

_USUAL_FAILURES = {400: 0, 429: 0, 500: 0, 503: 0}
"""Known to Prometheus before the first one happens, so that the first one is an increase."""


class RoundRecorder:
    """Counts rounds: an `Observer`."""

    def __init__(self) -> None:
        self._reasons = LabelValues()
        self._ttft, self._itl = Histogram(names.TTFT), Histogram(names.ITL)
        self._rounds, self._routes = Counter(names.ROUNDS), Counter(names.ROUTES)
        self._retries = Counter(names.ROUND_RETRIES)
        self._prompt, self._output = Counter(names.PROMPT_TOKENS), Counter(names.OUTPUT_TOKENS)
        self._breaks = Histogram(names.PREFIX_BREAKS)

    @property
    def recorded(self) -> list[Counter | Histogram]:
        counters = [self._rounds, self._routes, self._retries, self._prompt, self._output]
        return [self._ttft, self._itl, self._breaks, *counters]

    def __call__(self, record: DecisionRecord) -> None:
        prefill = names.INITIAL if record.is_initial else names.INCREMENTAL
        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s, prefill, record.route)
        if record.itl_s is not None:
            self._itl.observe(record.itl_s)
        if record.breaks_at_tokens is not None:
            self._breaks.observe(record.breaks_at_tokens)
        self._rounds.add(1, record.outcome)
        self._routes.add(1, record.route, self._reasons(record.reason))
        self._retries.add(record.retries)
        self._prompt.add(record.hist_tokens, names.HISTORY)
        self._prompt.add(record.incr_tokens, names.INCREMENT)
        self._output.add(record.output_tokens)


class CoordinatorReader:
    """Reads the metrics that mirror the state of a coordinator and its parts."""

    def __init__(
        self, coordinator: Coordinator, settings: CoordinatorSettings, store: StateStore, frames: FrameServer
    ) -> None:
        self._coordinator = coordinator
        self._settings = settings
        self._store = store
        self._frames = frames
        self._reasons = LabelValues()

    def __call__(self) -> Iterator[Reading]:
        """All readings; on the coordinator's event loop."""
        settings, coordinator = self._settings, self._coordinator
        yield Reading(names.SLO_TTFT, settings.ttft)
        yield Reading(names.SLO_ITL, settings.itl)
        yield Reading(names.COORDINATOR_INFO, 1, (settings.routing, settings.binding, settings.pools))
        yield Reading(names.ROUNDS_IN_PROGRESS, coordinator.running)
        yield Reading(names.HANDING_ON, not self._frames.off_reason)
        for status, count in {**_USUAL_FAILURES, **coordinator.failures}.items():
            yield Reading(names.ROUND_FAILURES, count, (str(status),))
        yield from self._admissions()
        yield Reading(names.ROUND_DEATHS, coordinator.worker_deaths)
        counts = coordinator.counts
        yield Reading(names.SESSIONS_BOUND, counts["bound"])
        yield Reading(names.ROUNDS_UNNAMED, counts["unnamed"])
        yield Reading(names.SESSIONS_BREAKING, len(coordinator.branches.breaking()))
        yield Reading(names.SESSIONS_REPINNED, counts["moved"])
        yield Reading(names.SESSIONS_LOST, counts["moved"], (names.WORKER_LOST,))
        for reason in names.MOVES:
            yield Reading(names.SESSION_MOVES, coordinator.session_moves[reason], (reason,))
        yield from self._cluster()
        yield from self._roles()
        yield from self._store.readings(is_available=coordinator.view.connected)

    def _admissions(self) -> Iterator[Reading]:
        decisions = self._coordinator.gate.decisions
        for session in names.SESSIONS:
            for decision in (names.ADMITTED, *names.ADMISSION_REFUSALS):
                yield Reading(names.ADMISSIONS, decisions[session, decision], (session, decision))

    def _cluster(self) -> Iterator[Reading]:
        view = self._coordinator.view
        for role in Role:
            yield Reading(names.LIVE_WORKERS, len(view.of_role(role)), (role,))
        yield Reading(names.LEASES_EXPIRED, view.counters.expired_workers)
        yield Reading(names.STATE_VIEW_AGE, view.age_s())
        yield Reading(names.STATE_LOSSES, view.counters.losses)

    def _roles(self) -> Iterator[Reading]:
        pools = self._coordinator.pools
        yield Reading(names.LEADING, pools is not None and pools.is_leading)
        assigned = Counter(names.ROLE_ASSIGNMENTS)
        for (role, reason), count in pools.assignments.items() if pools else ():
            assigned.add(count, role, self._reasons(reason))
        for labels, value in assigned.read():
            yield Reading(names.ROLE_ASSIGNMENTS, value, labels)
