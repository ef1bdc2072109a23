"""`ampd top`: finds a running graph, reads its shared state alone, and shows one snapshot after another."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

from pydantic import Field
from rich.live import Live

from ampd.cli.serve.settings import EMBEDDED
from ampd.cli.top_screen import Row, as_text, page
from ampd.errors import RunError, UserError
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import load_performance_model, profile_names
from ampd.policies.estimates import queued_s
from ampd.serving.kv_tiers import TIERS
from ampd.settings import GraphSettings, Settings, parse_settings
from ampd.state.embedded import URL, LocalGraph, graphs_at, only_one
from ampd.state.redis_connection import without_secrets
from ampd.state.redis_store import StateStore, open_store
from ampd.state.store import Heard, Overview, StateUnavailableError
from ampd.telemetry.metrics import names
from ampd.telemetry.windows import LENGTH_S, US, latency_summary
from ampd.types import CoordinatorView, KvWindow, Role, Route, ServedWindow, WorkerView, merged
from ampd.wire import fields_of

LARGEST_SESSIONS = 3


def snapshot_of(overview: Overview, now_s: float, model: PiecewiseModel | None = None) -> dict[str, Any]:
    """The state of the graph that `overview` describes. Its place and time are for the caller to add.

    Args:
        now_s: time of reading, on the clock of the tasks' arrival times.
        model: predicts the wait in each queue; without one nothing is predicted.
    """
    coordinators = sorted(overview.coordinators, key=lambda entry: entry.view.coordinator_id)
    workers = sorted(overview.workers, key=lambda entry: (entry.view.role, entry.view.worker_id))
    notes = list(_notes([entry.view for entry in coordinators], [entry.view for entry in workers]))
    slos = [entry.view.slo for entry in coordinators]
    most_common = max(slos, key=slos.count, default=None)
    ages_s = [entry.age_s for entry in coordinators] + [entry.age_s for entry in workers]
    return {
        "oldest_word_s": max(ages_s, default=0.0),
        "performance_model": model.name if model else None,
        "slo": {"ttft_s": most_common.ttft_s, "itl_s": most_common.itl_s} if most_common else None,
        "window": _window(merged(entry.view.window for entry in coordinators)),
        "coordinators": [_coordinator(entry) for entry in coordinators],
        "workers": [_worker(entry, now_s, _queue_wait_s(entry.view, model, notes)) for entry in workers],
        "kv": _kv_of_all([entry.view for entry in workers]),
        "sessions": {
            **_sessions([entry.view for entry in workers]),
            "breaking": sum(entry.view.breaking_sessions for entry in coordinators),
            "worst_breaking": _worst_breaking([entry.view for entry in coordinators]),
        },
        "notes": notes,
    }


def _window(window: ServedWindow) -> Row:
    counts, span_s = Counter(window.counts), window.span_s
    outcomes = {outcome: counts[f"outcome {outcome}"] for outcome in names.OUTCOMES}
    rounds = sum(outcomes.values())
    judged = rounds - outcomes[names.ABANDONED]
    met = outcomes[names.MET]
    reasons = sorted(_reasons(counts), key=lambda row: (-row["rounds"], row["route"], row["reason"]))
    return {
        "length_s": LENGTH_S,
        "span_s": span_s,
        "rounds": rounds,
        "abandoned": outcomes[names.ABANDONED],
        "refused": counts["refused"],
        "errors": outcomes[names.FAILED],
        "rounds_per_s": _share(rounds, span_s),
        "output_tokens_per_s": _share(counts["output_tokens"], span_s),
        "attainment": {
            "rounds": _share(met, judged),
            "ttft": _share(met + outcomes[names.MISSED_ITL], judged),
            "itl": _share(met + outcomes[names.MISSED_TTFT], judged),
        },
        "targets": {
            "ttft_s": _share(counts["ttft_targets_us"] / US, rounds) or None,
            "itl_s": _share(counts["itl_targets_us"] / US, rounds) or None,
        },
        **{f"{kind}_s": latency_summary(counts, kind) for kind in ("ttft_initial", "ttft_incremental", "itl")},
        "routes": {route: sum(row["rounds"] for row in reasons if row["route"] == route) for route in map(str, Route)},
        "reasons": reasons,
        "sessions_bound": counts["bound"],
        "sessions_repinned": counts["moved"],
        "unnamed": counts["unnamed"],
    }


def _reasons(counts: Mapping[str, int]) -> Iterator[Row]:
    for key, rounds in counts.items():
        word, _, decided = key.partition(" ")
        if word == "route":
            route, _, reason = decided.partition(" ")
            yield {"route": route, "reason": reason, "rounds": rounds}


def _coordinator(entry: Heard[CoordinatorView]) -> Row:
    view, window = entry.view, _window(entry.view.window)
    return {
        "coordinator_id": view.coordinator_id,
        "age_s": entry.age_s,
        "routing": view.routing,
        "binding": view.binding,
        "pools": view.pools,
        "rounds_in_progress": view.rounds_in_progress,
        "rounds": window["rounds"],
        "attainment": window["attainment"]["rounds"],
        "local_share": _share(window["routes"][Route.LOCAL], sum(window["routes"].values())),
        "is_leading": view.is_leading,
        "is_state_heard": view.is_state_heard,
        "state_losses": view.state_losses,
    }


def _worker(entry: Heard[WorkerView], now_s: float, queue_wait_s: float | None) -> Row:
    view = entry.view
    return {
        "worker_id": view.worker_id,
        "age_s": entry.age_s,
        "role": str(view.role),
        "tp": view.parallelism.tp,
        "time_factors": fields_of(view.parallelism.factors),
        "queue_prefills": view.queued_prefills,
        "queue_tokens": sum(task.incr_tokens for task in view.queue) + view.queue_rest.incr_tokens,
        "queue_wait_s": queue_wait_s,
        "oldest_wait_s": max((max(now_s - task.arrival_s, 0.0) for task in view.queue), default=None),
        "ttft_s": view.ttft.mean_s if view.ttft.count else None,
        "ttft_rounds": view.ttft.count,
        "itl_s": view.itl.mean_s if view.itl.count else None,
        "itl_tokens": view.itl.count,
        "decode_batch": view.decode_batch,
        "decode_context_tokens": view.decode_context_tokens,
        "kv_used_tokens": view.kv_used_tokens,
        "kv_capacity_tokens": view.kv_capacity_tokens,
        "store_used_tokens": view.store_used_tokens,
        "store_capacity_tokens": view.store_capacity_tokens,
        "sessions_held": len(view.held_tokens),
        "session_tokens": sum(view.held_tokens.values()),
        **_kv(view.kv_window),
    }


def _kv(window: KvWindow) -> Row:
    tiers = (window.device_tokens, window.store_tokens, window.peer_tokens, window.recomputed_tokens)
    return {
        "hit_tokens": dict(zip(TIERS, tiers, strict=True)),
        "evicted_tokens": window.evicted_tokens,
        "reload_s": {"count": window.reloads, "mean": _share(window.reload_s, window.reloads)},
    }


def _kv_of_all(workers: Sequence[WorkerView]) -> Row:
    windows = [fields_of(view.kv_window).values() for view in workers]
    return {
        "store_used_tokens": sum(view.store_used_tokens for view in workers),
        "store_capacity_tokens": sum(view.store_capacity_tokens for view in workers),
        **_kv(KvWindow(*map(sum, zip(*windows, strict=True)))),
    }


def _queue_wait_s(view: WorkerView, model: PiecewiseModel | None, notes: list[str]) -> float | None:
    if model is None:
        return None
    try:
        return queued_s(view, model)
    except UserError as error:
        note = f"no predicted wait: {error}"
        if note not in notes:
            notes.append(note)
        return None


def _sessions(workers: Sequence[WorkerView]) -> Row:
    owners = [view for view in workers if view.role.owns_sessions]
    most_tokens: dict[str, int] = {}
    for view in owners:
        for session_id, tokens in view.held_tokens.items():
            most_tokens[session_id] = max(tokens, most_tokens.get(session_id, 0))
    held: list[Row] = [
        {"session_id": session_id, "worker_id": view.worker_id, "tokens": tokens}
        for view in owners
        for session_id, tokens in view.held_tokens.items()
        # A mixed worker also has copies of sessions that it prefilled for their owners, which hold more of them.
        if view.role is not Role.MIXED or tokens == most_tokens[session_id]
    ]
    largest = sorted(held, key=lambda row: (-row["tokens"], row["session_id"], row["worker_id"]))
    return {
        "held": len({row["session_id"] for row in held}),
        "tokens": sum(row["tokens"] for row in held),
        "largest": largest[:LARGEST_SESSIONS],
    }


def _worst_breaking(coordinators: Sequence[CoordinatorView]) -> list[Row]:
    """The sessions that lose the most because their prefix breaks in every round."""
    sessions = [session for view in coordinators for session in view.breaking]
    worst = sorted(sessions, key=lambda session: session.at_tokens - session.of_tokens)
    return [fields_of(session) for session in worst[:LARGEST_SESSIONS]]


def _notes(coordinators: Sequence[CoordinatorView], workers: Sequence[WorkerView]) -> Iterator[str]:
    if not workers and not coordinators:
        yield "no worker and no coordinator is alive in this namespace"
    if workers and not coordinators:
        yield "no coordinator is alive: no round can be served, and neither targets nor routes are known"
    if coordinators and not any(view.role.owns_sessions for view in workers):
        yield "no decode worker is alive: every round is refused with 503"
    if cut_off := [view.coordinator_id for view in coordinators if not view.is_state_heard]:
        yield f"without the shared state, deciding by the last known view: coordinator {', '.join(cut_off)}"
    if len({view.slo for view in coordinators}) > 1:
        yield "the coordinators have different targets (--ttft, --itl); those of most of them are shown"


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# -- The body of `ampd top`: finds the graph, reads its shared state, and shows one snapshot after another

# -- settings of `ampd top`


class TopSettings(Settings):
    """Watch a running graph: workers, queues, latencies against the SLO, routes, sessions. q or Ctrl-C ends it."""

    known_names: ClassVar = {"perf": profile_names}

    namespace: str | None = Field(
        None,
        validation_alias="dyn_namespace",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Dynamo namespace of the graph; default: that of the `ampd serve` found here, else `ampd`.",
    )
    url: str | None = Field(None, description=URL)
    state_url: str | None = Field(
        None,
        description="The graph's shared state; default: that of the "
        f"`ampd serve` found here, else {GraphSettings.model_fields['state_url'].default}.",
    )
    interval_s: float = Field(1.0, ge=0.1, description="Seconds between two reads.")
    once: bool = Field(False, description="Read once, print and end.")
    as_json: bool = Field(
        False,
        validation_alias="json",
        description="Print JSON on stdout: one object with --once, else one line per read.",
    )
    perf: str | None = Field(
        None,
        description="Performance model, to predict the waiting time of each queue; default: that of the "
        "`ampd serve` found here, else none.",
    )


# -- finds the graph to show and reads its shared state: the whole I/O of `ampd top`

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
    model: PiecewiseModel | None = None
    hint: str = ""

    @property
    def place(self) -> str:
        """The shared state without credentials."""
        return without_secrets(self.state_url)

    async def connected(self) -> StateStore:
        """The shared state.

        Raises:
            UserError: it does not answer, or it refuses the connection.
        """
        try:
            return await open_store(self.state_url, self.namespace, clock=time.monotonic)
        except StateUnavailableError as error:
            raise UserError(
                f"{PROG}: {error}; {self.hint}name the graph's Redis with --state-url or AMPD_STATE_URL, as in "
                "redis://USER:PASSWORD@HOST:6379/0"
            ) from None

    async def read(self, store: StateStore) -> dict[str, Any]:
        """The snapshot of now, with the keys of docs/top.md#json.

        Raises:
            StateUnavailableError: the shared state does not answer, or it refuses the command.
        """
        return {
            "taken_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "namespace": self.namespace,
            "state": self.place,
            **snapshot_of(await store.overview(), time.monotonic(), self.model),
        }


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
    graphs = graphs_at(settings.url)
    if found := only_one([graph for graph in graphs if settings.namespace in (None, graph.namespace)], PROG):
        return Target(found.state_url, found.namespace, model or _model_of(found))
    hint = "no `ampd serve` runs on this machine: "
    if others := ", ".join(sorted({graph.namespace for graph in graphs})):
        hint = f"no `ampd serve` of namespace {namespace} runs on this machine ({others} does): "
    return Target(str(default["state_url"].default), namespace, model, hint)


def _model_of(graph: LocalGraph) -> PiecewiseModel | None:
    try:
        return load_performance_model(graph.perf)
    except UserError:
        return None  # the file no longer exists, and the user did not ask for predictions


# -- shows one snapshot after another: a screen in a terminal, lines elsewhere. q, Ctrl-C or SIGTERM ends it

Read = Callable[[], Awaitable[Row]]

QUIT_KEYS = frozenset("qQ\x03\x04")
_HINT = " (q or Ctrl-C ends)"
_WITHOUT_TERMINAL = (100, 24)
"""Columns and lines; COLUMNS and the size of a terminal come first."""


@contextlib.contextmanager
def stopping_signals() -> Iterator[asyncio.Event]:
    """An event that SIGINT and SIGTERM set while the block runs."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def print_snapshot(snapshot: Row, *, as_json: bool, indent: int | None = None) -> None:
    """Print a snapshot on stdout, as JSON or as text that is as wide as the terminal."""
    if as_json:
        print(json.dumps(snapshot, indent=indent), flush=True)
    else:
        width = shutil.get_terminal_size(_WITHOUT_TERMINAL).columns
        print(as_text(snapshot, width, colours=sys.stdout.isatty()), end="", flush=True)


async def print_each(read: Read, interval_s: float, stopped: asyncio.Event, *, as_json: bool) -> None:
    """Print one snapshot after another on stdout. A failed read is a line on stderr."""
    while not stopped.is_set():
        try:
            print_snapshot(await read(), as_json=as_json)
            print("" if as_json else "\n", end="", flush=True)
        except StateUnavailableError as error:
            print(f"ampd top: {error}", file=sys.stderr, flush=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), interval_s)


async def show_each(read: Read, interval_s: float, stopped: asyncio.Event, first: Row) -> None:
    """Fill the terminal with one snapshot after another.

    While the shared state is lost, the last snapshot stays on the screen with the reason.
    """
    snapshot = shown = first
    with _quit_keys(stopped), Live(screen=True, auto_refresh=False) as live:
        while not stopped.is_set():
            live.update(page(shown, _HINT), refresh=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), interval_s)
            try:
                shown = snapshot = await read()
            except StateUnavailableError as error:
                note = f"as of {snapshot['taken_at']}: {error}"
                shown = {**snapshot, "notes": [note, *snapshot["notes"]]}


@contextlib.contextmanager
def _quit_keys(stopped: asyncio.Event) -> Iterator[None]:
    """Set `stopped` when a quit key is pressed. Afterwards the terminal is in its former mode."""
    if not sys.stdin.isatty():
        yield
        return
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read_keys() -> None:
        keys = os.read(descriptor, 64).decode(errors="replace")
        if not keys or QUIT_KEYS & set(keys):
            stopped.set()
            loop.remove_reader(descriptor)

    try:
        tty.setcbreak(descriptor)
        loop.add_reader(descriptor, read_keys)
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)


# -- the body of `ampd top`


def run(argv: Sequence[str]) -> int:
    """Show a running graph until q, Ctrl-C or SIGTERM, or once; 0.

    Raises:
        UserError: a wrong call, or a shared state that does not answer.
        RunError: with `--once`, no worker and no coordinator is alive.
    """
    settings = parse_settings(TopSettings, argv, PROG)
    target = find_target(settings)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars and ellipses in a terminal that knows only ASCII
    asyncio.run(_run(settings, target))
    return 0


async def _run(settings: TopSettings, target: Target) -> None:
    store = await target.connected()
    read = partial(target.read, store)
    try:
        try:
            first = await read()
        except StateUnavailableError as error:
            raise UserError(f"{PROG}: {error}; the rights that `ampd top` needs are in docs/state.md") from None
        if settings.once:
            if not first["workers"] and not first["coordinators"]:
                raise RunError(
                    f"{PROG}: no worker and no coordinator is alive in namespace {target.namespace!r} of "
                    f"{target.place}; is the graph running, and is this its --namespace?"
                )
            print_snapshot(first, as_json=settings.as_json, indent=1)
            return
        with stopping_signals() as stopped:
            if settings.as_json or not sys.stdout.isatty():
                await print_each(read, settings.interval_s, stopped, as_json=settings.as_json)
            else:
                await show_each(read, settings.interval_s, stopped, first)
    finally:
        await store.close()
