"""What the tests of `ampd top` look at: overviews made up from parts, and any overview at all."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import strategies as st

from ampd.cli.top import snapshot_of
from ampd.perf.piecewise import PiecewiseModel
from ampd.state.store import Heard, Overview
from ampd.telemetry.metrics import names
from ampd.telemetry.windows import latency_counts
from ampd.types import (
    CoordinatorView,
    KvWindow,
    Parallelism,
    PrefillTask,
    Role,
    Route,
    ServedWindow,
    Slo,
    Window,
    WorkerView,
)

NOW_S = 1000.0
TAKEN_AT = "2026-01-02T03:04:05.678+00:00"
SLO = Slo(ttft_s=0.5, itl_s=0.05)


def snapshot(
    workers: list[WorkerView],
    coordinators: list[CoordinatorView],
    age_s: float = 0.25,
    namespace: str = "ampd",
    model: PiecewiseModel | None = None,
) -> dict[str, Any]:
    """The snapshot of these views, all of one age."""
    overview = Overview([Heard(view, age_s) for view in workers], [Heard(view, age_s) for view in coordinators])
    place = {"taken_at": TAKEN_AT, "namespace": namespace, "state": "redis://host:6379/0"}
    return {**place, **snapshot_of(overview, NOW_S, model)}


def task(incr_tokens: int = 100, waited_s: float = 1.0) -> PrefillTask:
    """A waiting prefill."""
    return PrefillTask("t", "s", 50, incr_tokens, NOW_S - waited_s, SLO)


def window(
    outcomes: dict[str, int],
    routes: dict[str, int] | None = None,
    span_s: float = 60.0,
    latencies_s: dict[str, list[float]] | None = None,
    **counts: int,
) -> ServedWindow:
    """A window with these rounds by outcome, routes with reasons, latencies by kind, and further counts."""
    total = Counter({f"outcome {outcome}": count for outcome, count in outcomes.items()} | counts)
    total.update({f"route {route}": count for route, count in (routes or {}).items()})
    for kind, values_s in (latencies_s or {}).items():
        for value_s in values_s:
            total.update(latency_counts(kind, value_s))
    return ServedWindow(span_s, total)


texts = st.text(max_size=40) | st.sampled_from(
    ["\x1b[2J\x1b[31m", "[red]x[/red]", "東京" * 9, "a\nb\rc\td", "\ud800", ""]
)
counts = st.integers(0, 10**13)
times_s = st.floats(0, 1e9)
words = st.sampled_from(
    [
        *(f"outcome {outcome}" for outcome in names.OUTCOMES),
        *("output_tokens", "refused", "unnamed", "bound", "moved", "itl us", "itl 7", "itl x"),
    ]
)
windows = st.builds(
    ServedWindow,
    span_s=st.floats(0, 60),
    counts=st.dictionaries(words | texts | st.builds("route {} {}".format, st.sampled_from(Route), texts), counts),
)
slos = st.builds(Slo, ttft_s=st.floats(1e-4, 1e4), itl_s=st.floats(1e-4, 1e4))
coordinators = st.builds(
    CoordinatorView,
    coordinator_id=texts,
    slo=slos,
    routing=texts,
    binding=texts,
    pools=texts,
    rounds_in_progress=counts,
    is_leading=st.booleans(),
    is_state_heard=st.booleans(),
    state_losses=counts,
    window=windows,
)
tasks = st.builds(
    PrefillTask,
    task_id=texts,
    session_id=texts,
    hist_tokens=counts,
    incr_tokens=counts,
    arrival_s=st.floats(-1e9, 2 * NOW_S),
    slo=slos,
)
workers = st.builds(
    WorkerView,
    worker_id=texts,
    role=st.sampled_from(Role),
    parallelism=st.integers(1, 99).map(Parallelism),
    queue=st.lists(tasks, max_size=3).map(tuple),
    ttft=st.builds(Window, times_s, counts),
    itl=st.builds(Window, times_s, counts),
    decode_batch=counts,
    decode_context_tokens=counts,
    kv_used_tokens=counts,
    kv_capacity_tokens=counts,
    store_used_tokens=counts,
    store_capacity_tokens=counts,
    held_tokens=st.dictionaries(texts, counts, max_size=4),
    label=texts,
    kv_window=st.builds(KvWindow, counts, counts, counts, counts, counts, counts, times_s),
)
snapshots = st.builds(snapshot, st.lists(workers, max_size=5), st.lists(coordinators, max_size=3), times_s, texts)
