"""The vocabulary of all packages: tasks, published views and decisions, free of I/O. No code changes one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import Meta

GIB = 1 << 30

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, le=1e300)]
Moment = Annotated[float, Meta(ge=-1e300, le=1e300)]
Text = Annotated[str, Meta(max_length=8192)]
"""Types of fields that travel between processes. msgspec refuses other values, because a process that publishes
nonsense must not mislead the decisions of the others."""


class Role(StrEnum):
    """The new work that a worker gets.

    A prefill worker gets prefills of sessions that other workers own. A decode worker gets sessions of its own, and may
    prefill their rounds itself. A mixed worker gets both.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def owns_sessions(self) -> bool:
        """Whether new sessions are bound to it."""
        return self is not _PREFILL

    @property
    def takes_prefills(self) -> bool:
        """Whether it gets prefills of sessions that other workers own."""
        return self is not _DECODE


# Python looks a member of an enumeration up at each use, which takes as long as the rest of such a question.
_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE


Moves = Literal["never", "needed", "any"]
"""Which sessions may move to another owner between two rounds: none, those whose owner owns no sessions any more or has
a full memory, or all that have a reason (`ampd.serving.moves`)."""


class Route(StrEnum):
    """Where a round's increment is prefilled: on the session's decode worker, or on a prefill worker."""

    LOCAL = "local"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets of one round.

    Attributes:
        ttft_s: seconds from the moment the round's prefill is handed to the system to its first token.
        itl_s: seconds between consecutive output tokens.
    """

    ttft_s: Seconds
    itl_s: Seconds

    def met(self, ttft_s: float | None, itl_s: float | None) -> bool:
        """Whether a round without an error met both targets."""
        return self.ttft_met(ttft_s) and self.itl_met(itl_s)

    def ttft_met(self, ttft_s: float | None) -> bool:
        """Whether a first token came in time. None: there was none."""
        return ttft_s is not None and ttft_s <= self.ttft_s

    def itl_met(self, itl_s: float | None) -> bool:
        """Whether the mean gap between tokens was within its target. None: a single token has no gap."""
        return itl_s is None or itl_s <= self.itl_s


MAX_WAIT = 4.0
"""Longest predicted wait of a round, in TTFT targets, where no other is set (`ampd.serving.admission`)."""

ATTAINMENT = 0.9
"""Attainment of the targets: the share of rounds within both that counts as carrying a load. Goodput asks for it."""


LEAST_FACTOR, MOST_FACTOR = 0.25, 4.0
Factor = Annotated[float, Meta(ge=LEAST_FACTOR, le=MOST_FACTOR)]


@dataclass(frozen=True, slots=True)
class Factors:
    """How many times as long as the performance model says a worker takes, by kind, from what it has measured.

    Attributes:
        prefill, step, mixed: passes that prefill, that are a step of the decode batch, and that are both.
        read, load: KV from another worker, and from the worker's own store.
    """

    prefill: Factor = 1.0
    step: Factor = 1.0
    mixed: Factor = 1.0
    read: Factor = 1.0
    load: Factor = 1.0


_NO_FACTORS = Factors()


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How one worker replica is partitioned over GPUs (theta in the paper), how fast it is, and where it runs.

    Replicas of equal partition are equal.

    Attributes:
        factors: on the times of the performance model.
        host: workers with the same name load each other's KV in place; "": this one reads all KV over the network.
    """

    tp: Count = 1
    factors: Factors = field(default=_NO_FACTORS, compare=False)
    host: Text = field(default="", compare=False)

    def shares_host(self, other: Parallelism) -> bool:
        """Whether each can load the other's KV in place."""
        return self.host != "" and self.host == other.host


def usable_tokens(held_tokens: int, prompt_tokens: int) -> int:
    """How much of the KV that is held of a prompt a prefill uses.

    At least one token is always computed, because its logits give the first output token.
    """
    return min(held_tokens, prompt_tokens - 1)


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """One round's prefill, as the policies see it.

    Attributes:
        task_id: unique over the cluster.
        session_id: the session that the round belongs to.
        hist_tokens: context whose KV already exists on the session's decode worker (0 for an initial prefill).
        incr_tokens: new tokens to prefill in this round.
        arrival_s: when the round was handed to the system, on the clock of the `now_s` that the policy is called with.
            A round whose output has begun has no TTFT left to meet: it counts from when a lost worker made it wait
            again.
        slo: the round's targets.
        postponements: how often a later task of the same queue was run before this one.
        session_missed: an earlier round of the session has missed a target, and with it the whole session.
        has_output: the client has some of the round's output, which a refusal would make worthless.
    """

    task_id: Text
    session_id: Text
    hist_tokens: Count
    incr_tokens: Count
    arrival_s: Moment
    slo: Slo
    postponements: Count = 0
    session_missed: bool = False
    has_output: bool = False

    @property
    def context_tokens(self) -> int:
        """Length of the whole prompt: history and increment."""
        return self.hist_tokens + self.incr_tokens

    def postponed(self) -> PrefillTask:
        """The task after one more later task of its queue was run before it."""
        return self._changed(self.hist_tokens, self.incr_tokens, self.arrival_s, self.postponements + 1)

    def with_tokens(self, hist_tokens: int, incr_tokens: int) -> PrefillTask:
        """The task with another history and another increment."""
        return self._changed(hist_tokens, incr_tokens, self.arrival_s, self.postponements)

    def shifted(self, by_s: float) -> PrefillTask:
        """The task on a clock that shows `by_s` more."""
        return self._changed(self.hist_tokens, self.incr_tokens, round(self.arrival_s + by_s, 6), self.postponements)

    def _changed(self, hist_tokens: int, incr_tokens: int, arrival_s: float, postponements: int) -> PrefillTask:
        # Without `dataclasses.replace`, because a pick may postpone the whole queue.
        return PrefillTask(
            self.task_id,
            self.session_id,
            hist_tokens,
            incr_tokens,
            arrival_s,
            self.slo,
            postponements,
            self.session_missed,
            self.has_output,
        )


WINDOW_S = 10.0
"""Length of the windows of TTFT and ITL, where no other is set."""


@dataclass(frozen=True, slots=True)
class Window:
    """A windowed mean: TTFTs of a prefill worker or ITLs of a decode worker over the last seconds."""

    mean_s: Seconds = 0.0
    count: Count = 0


# Not frozen: every slice of a prefill makes one per round of the batch, and a frozen one takes three times as long.
@dataclass(slots=True)
class RunningRound:
    """One round of a decode batch, as its worker knows it.

    Attributes:
        tokens: output tokens so far, including the first.
        elapsed_s: seconds since the first token.
        itl_slo_s: the round's ITL target.
        context_tokens: its prompt and output so far.
    """

    tokens: int
    elapsed_s: float
    itl_slo_s: float
    context_tokens: int


@dataclass(frozen=True, slots=True)
class QueueRest:
    """The prefills of a queue that its view does not list: how many, and their sums."""

    tasks: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    hist_tokens: Count = 0
    incr_tokens: Count = 0


@dataclass(frozen=True, slots=True)
class KvWindow:
    """The KV of the calls that ended on a worker in the last minute, for viewers. No decision reads it.

    Attributes:
        device_tokens, store_tokens, peer_tokens: prompt tokens whose KV was on the device, in the worker's store, or
            was read from a peer.
        recomputed_tokens: tokens of histories whose KV was in none of them.
        evicted_tokens: tokens whose KV the store dropped, for any cause.
        reloads: calls that copied KV from the store to the device; `reload_s` is the sum of their times.
    """

    device_tokens: Count = 0
    store_tokens: Count = 0
    peer_tokens: Count = 0
    recomputed_tokens: Count = 0
    evicted_tokens: Count = 0
    reloads: Count = 0
    reload_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The knowledge about a worker that decisions may use, as of its last event.

    Attributes:
        worker_id: the Dynamo instance id, in hexadecimal.
        role: the kind of new work that it gets. After a change of roles, work of its old role may still run.
        label: the word that the pools policy gave it, for policies to read; "" without one.
        queue: prefills that wait or run there, in queue order. A published view lists the first ones only.
        ttft: windowed TTFT of the prefills that ran there.
        itl: windowed ITL of the decode batch (decode workers).
        decode_batch: sessions decoding now; `decode_context_tokens` is their total context.
        kv_used_tokens, kv_capacity_tokens: KV memory of the device in tokens.
        store_used_tokens, store_capacity_tokens: of the KV store, which keeps sessions between their rounds. Records
            that no session of this worker needs are not counted as used. Capacity 0: there is no store, and the device
            keeps sessions.
        queue_rest: the prefills behind those of `queue`.
        kv_window: where the KV of the last minute came from.
        held_tokens: session id -> tokens of the session's context whose KV this worker holds.
        shared_prefixes: key -> tokens of the prefixes that this worker holds and two or more sessions have used here
            (`ampd.serving.shared_prefixes`).
        fingerprint: of weights and settings; workers read KV from each other only if it is equal; "": not known.
        tokenizer: digest of what its token ids mean (`ampd.model_folder`); "": not known.
        secrets: marks of the secrets whose signatures it accepts (`ampd.call_signatures`); empty: it takes every call.
        clock_s: its wall clock when it published; 0: not known.
    """

    worker_id: Text
    role: Role
    parallelism: Parallelism = Parallelism()
    queue: tuple[PrefillTask, ...] = ()
    ttft: Window = Window()
    itl: Window = Window()
    decode_batch: Count = 0
    decode_context_tokens: Count = 0
    kv_used_tokens: Count = 0
    kv_capacity_tokens: Count = 0
    max_context_tokens: Count = 0
    held_tokens: Mapping[Text, Count] = field(default_factory=dict)
    label: Text = ""
    fingerprint: Text = ""
    store_used_tokens: Count = 0
    store_capacity_tokens: Count = 0
    queue_rest: QueueRest = QueueRest()
    kv_window: KvWindow = KvWindow()
    shared_prefixes: Mapping[Text, Count] = field(default_factory=dict)
    tokenizer: Text = ""
    secrets: tuple[Text, ...] = ()
    clock_s: Seconds = 0.0

    @property
    def queued_prefills(self) -> int:
        """Prefills that wait or run there, the unlisted ones included."""
        return len(self.queue) + self.queue_rest.tasks


@dataclass(frozen=True, slots=True)
class RouteEstimate:
    """The predicted TTFT of one candidate route, in seconds, with its parts."""

    route: Route
    worker_id: str
    total_s: float
    prefill_s: float
    queue_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """The worker that prefills a round, and the reason.

    Attributes:
        worker_id: the worker that prefills: the decode worker itself if the route is local.
        reason: a short stable word for metrics and logs (`ttft-slack`, `itl-slack`, `cheapest`, ...).
        estimates: the compared routes, if the policy compared any.
    """

    route: Route
    worker_id: str
    reason: str
    estimates: tuple[RouteEstimate, ...] = ()


# -- The published state of a coordinator, with the rounds of its last minute


@dataclass(frozen=True, slots=True)
class ServedWindow:
    """The rounds that ended within a window, with any outcome, as counts that add up over coordinators.

    Attributes:
        span_s: the part of the window during which a coordinator was running; rates divide by it.
        counts: by words. Of rounds that were placed at least once: `outcome OUTCOME`, `route ROUTE REASON`,
            `output_tokens` (of the first choice), `ttft_targets_us`, `itl_targets_us`. Of rounds that were refused
            because of load: `refused`; that came without a session: `unnamed`. Of sessions: `bound` to a decode worker,
            `moved` because theirs was lost. Latencies: `ttft_initial`, `ttft_incremental` and `itl` with a bucket, or
            with `us`, their sum in microseconds. An ITL is the mean of a round.
    """

    span_s: Seconds = 0.0
    counts: Mapping[Text, Count] = field(default_factory=dict)


def merged(windows: Iterable[ServedWindow]) -> ServedWindow:
    """The sum of the windows, with the longest span."""
    span_s, counts = 0.0, Counter[str]()
    for window in windows:
        span_s = max(span_s, window.span_s)
        counts.update(window.counts)
    return ServedWindow(span_s, counts)


@dataclass(frozen=True, slots=True)
class BreakingSession:
    """A session whose prompts of late do not continue each other.

    Attributes:
        session_id: its name inside of the graph.
        rounds: in a row.
        at_tokens: where the last prompt departs from the nearest context before.
        of_tokens: length of that context.
    """

    session_id: Text
    rounds: Count
    at_tokens: Count
    of_tokens: Count


@dataclass(frozen=True, slots=True)
class CoordinatorView:
    """The state that a coordinator publishes for viewers such as `ampd top`. No policy reads it.

    Other coordinators read only its `context_tokens`, before they register the model anew (`router.model_card`).

    Attributes:
        coordinator_id: the Dynamo instance id, in hexadecimal.
        slo: the targets of rounds without their own.
        routing, binding, pools: the policies by which it decides.
        rounds_in_progress: rounds that it serves now.
        is_leading: it assigns the workers' roles (with static pools no coordinator does).
        is_state_heard: it is connected to the shared state; otherwise it decides by its last view.
        state_losses: times that it lost the shared state since it started.
        context_tokens: with which it has registered the model at the frontends; 0: it has not, or without a limit.
        window: the rounds that ended there in the last minute.
        breaking: sessions whose prefix breaks in every round, at most 8; `breaking_sessions`: how many there are.
    """

    coordinator_id: Text
    slo: Slo
    routing: Text = ""
    binding: Text = ""
    pools: Text = ""
    rounds_in_progress: Count = 0
    is_leading: bool = False
    is_state_heard: bool = True
    state_losses: Count = 0
    context_tokens: Count = 0
    window: ServedWindow = field(default_factory=ServedWindow)
    breaking: tuple[BreakingSession, ...] = ()
    breaking_sessions: Count = 0
