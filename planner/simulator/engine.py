"""One engine replica in virtual time, which asks before each pass what to compute.

Decode steps are not events. A run of steps is planned up to the first request that ends. A request that comes in
between cuts the run after the step in progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf

from ampd.perf.corrections import MIXED, PREFILL, STEP, CorrectedModel
from ampd.perf.model import PerformanceModel, joined_tokens
from ampd.serving.pass_sizes import NextPass, PassSizes
from ampd.types import Parallelism, Role, RunningRound
from planner.simulator.decode_batch import DecodeBatch, StepRun
from planner.simulator.kv_memory import KvMemory, Reloads
from planner.simulator.options import World
from planner.simulator.outcome import Span
from planner.simulator.request import Part, Prefilling, SimulatedRequest

LONGEST_RUN_STEPS = 1 << 60
"""Most decode steps between two events. With 1 each step is an event: the results are the same, but slower."""


class SimulatedEngine:
    """The time line of one replica.

    Attributes:
        batch: the requests that decode.

    Args:
        times: compares the times of passes with those that it predicts; None: they are not compared.
        reloads: of a worker with a KV store.
        role: the role that the worker has now.
    """

    def __init__(
        self,
        worker_id: str,
        parallelism: Parallelism,
        memory: KvMemory,
        world: World,
        times: CorrectedModel | None = None,
        reloads: Reloads | None = None,
        role: Callable[[], Role] = lambda: Role.DECODE,
    ) -> None:
        self._worker_id = worker_id
        self._parallelism = parallelism
        self._memory = memory
        memory.on_room = self._room
        self._loop = world.loop
        self._model = world.model
        self._hand_over_pass = world.options.hand_over_pass
        self._spans = world.spans
        self._reloads = reloads
        self._sizes = PassSizes(world.policies.slicing, times or world.belief, parallelism, memory.page_tokens, role)
        self._has_paused = False
        self._times = times
        self._computed = (PREFILL, 0.0, 0.0)  # of the pass in progress: kind, predicted and true time
        self.busy_s = {"prefill": 0.0, "decode": 0.0}
        self.batch = DecodeBatch(world.options.window_s, world.gaps)
        self._waiting: deque[SimulatedRequest] = deque()
        self._prefilling = Prefilling(memory.page_tokens)
        self._busy = False
        self._is_ending_pass = False
        self._late: list[SimulatedRequest] = []

    def running(self, now_s: float, itl_slo_s: float, *, with_lost: bool = True) -> list[RunningRound]:
        """The rounds with a first token, those that wait for their hand-over pass included.

        Args:
            with_lost: also those whose KV was lost on the way, which are prefilled once more.
        """
        rounds = self.batch.running(now_s, itl_slo_s)
        for request in (*self._waiting, *self._prefilling, *self._late):
            if request.is_handed_over and (with_lost or request.is_taken_over(self._memory.page_tokens)):
                rounds.append(RunningRound(1, now_s - request.first_token_s, itl_slo_s, request.prompt_tokens))
        return rounds

    # -- requests

    def submit(self, *requests: SimulatedRequest) -> None:
        """Take requests in at once; they run as soon as the memory has room and a pass begins."""
        for request in requests:
            self._memory.protect(request.session_id)
        if self._is_ending_pass:
            self._late.extend(requests)
        else:
            self._enqueue(requests)

    def _enqueue(self, requests: tuple[SimulatedRequest, ...] | list[SimulatedRequest]) -> None:
        self._waiting.extend(requests)
        if not self._busy:
            self._next()
        else:
            self._cut_run()

    def _room(self) -> None:
        """Memory has become free: requests that wait for it get it after the step in progress."""
        if self._waiting:
            self._cut_run()

    # -- passes

    def _next(self) -> None:
        """Begin what comes next."""
        self._admit()
        if self._prefilling:
            self._next_prefill()
        elif self.batch:
            self._decode_run(LONGEST_RUN_STEPS)
        else:
            self._busy = False

    def _next_prefill(self) -> None:
        """Begin a pass that prefills, or a step of the batch alone if the slicing wants one first."""
        chosen = self._chosen()
        parts = self._prefilling.begin(chosen.tokens)
        if not parts:
            self._decode_run(1)
            return
        self._begin_pass(parts, is_mixed=chosen.is_mixed)
        is_beside = bool(self.batch)
        for request, tokens in tuple(self._prefilling.in_pass):
            if request.on_pass is not None:
                left_tokens = request.left_tokens - tokens
                request.on_pass(left_tokens, is_last=is_beside and not left_tokens)

    def _chosen(self) -> NextPass:
        prefilling, now_s = self._prefilling, self._loop.now_s
        oldest = prefilling.oldest
        itl_slo_s = inf if oldest is None else oldest.slo.itl_s
        rounds = self.running(now_s, itl_slo_s, with_lost=False) if self.batch else ()
        return self._sizes.next(
            oldest,
            prefilling.left_tokens,
            rounds,
            now_s,
            handed_over=prefilling.handed_over,
            has_paused=self._has_paused,
        )

    def _admit(self) -> None:
        waiting, memory = self._waiting, self._memory
        while waiting:
            request = waiting[0]
            session_id = request.session_id
            if not memory.reserve(session_id, request.total_tokens):
                return
            waiting.popleft()
            memory.unprotect(session_id)
            held = memory.held_tokens(session_id)
            if held < request.cached_tokens:
                # Evicted while it waited: the KV that was read to go behind it is of no use either.
                request.cached_tokens, request.read_tokens = held, 0
            if self._reloads is not None:
                self._reloads.admit(request)
            memory.computed(session_id, request.cached_tokens + request.read_tokens)
            if request.is_taken_over(memory.page_tokens) and not self._hand_over_pass and not request.reload_s:
                self.batch.join(request, 0)
            else:
                self._prefilling.add(request)

    def _begin_pass(self, parts: Sequence[Part], *, is_mixed: bool) -> None:
        self._busy = True
        now_s, batch = self._loop.now_s, len(self.batch)
        computed_s = self._pass_s(self._model, parts, is_mixed=is_mixed)
        if self._times is not None:
            predicted_s = self._pass_s(self._times, parts, is_mixed=is_mixed)
            self._computed = (MIXED if is_mixed else PREFILL, predicted_s, computed_s)
        self._has_paused = batch > 0 and not is_mixed
        self._loop.at(now_s + self._with_reloads_s(computed_s), self._end_pass, (now_s, is_mixed))

    def _pass_s(self, model: PerformanceModel, parts: Sequence[Part], *, is_mixed: bool) -> float:
        if is_mixed:
            return model.mixed_pass_s(parts, len(self.batch), self.batch.context_tokens, self._parallelism)
        hist_tokens, incr_tokens = parts[0] if len(parts) == 1 else joined_tokens(parts)
        return model.prefill_s(hist_tokens, incr_tokens, self._parallelism)

    def _with_reloads_s(self, computed_s: float) -> float:
        """Time of a pass whose layers are computed while the KV of later layers is reloaded."""
        if self._reloads is None:
            return computed_s
        return max(computed_s, self._prefilling.take_reload_s())

    def _end_pass(self, begun: tuple[float, bool]) -> None:
        start_s, is_mixed = begun
        self.busy_s["prefill"] += self._loop.now_s - start_s
        self._note_prefills(start_s)
        if is_mixed:
            self._end_steps(StepRun(start_s, self._loop.now_s - start_s, 0.0, 1))
        else:
            self._measure(1)
        self._complete(self._prefilling.end())

    def _complete(self, done: list[SimulatedRequest]) -> None:
        """Call the owners of prefilled requests, and begin what comes next.

        Requests that the owners submit in these calls are too late for it, because an engine learns of them during its
        next step.
        """
        self._is_ending_pass = True
        for request in done:
            self._prefilled(request)
        self._is_ending_pass = False
        self._next()
        late, self._late = self._late, []
        if late:
            self._enqueue(late)

    def _prefilled(self, request: SimulatedRequest) -> None:
        now_s = self._loop.now_s
        self._memory.computed(request.session_id, request.prompt_tokens)
        if request.output_tokens:
            if request.is_handed_over:
                self.batch.note_gap(now_s - request.token_s, now_s)
            else:
                request.first_token_s = now_s
            request.token_s = now_s
        if request.output_tokens > 1:
            # Before the callback: a prefill that this token releases must see the round in the batch.
            self.batch.join(request, 1)
        if request.output_tokens and request.on_first is not None:
            request.on_first(request, now_s)
        if request.output_tokens <= 1:
            self._finish(request)

    def _finish(self, request: SimulatedRequest) -> None:
        # The last token was generated but never read, so it has no KV yet.
        self._memory.settle(request.session_id, request.total_tokens - bool(request.output_tokens))
        request.on_done(request, self._loop.now_s)

    # -- decode

    def _decode_run(self, most_steps: int) -> None:
        """Plan steps up to the first request that ends, and no more than `most_steps`."""
        self._busy = True
        batch, context_tokens = len(self.batch), self.batch.context_tokens
        first_s = self._model.decode_step_s(batch, context_tokens, self._parallelism)
        if self._times is not None:
            predicted_s = self._times.decode_step_s(batch, context_tokens, self._parallelism)
            self._computed = (STEP, predicted_s, first_s)
        growth_s = self._model.decode_step_s(batch, context_tokens + batch, self._parallelism) - first_s
        self._plan(StepRun(self._loop.now_s, first_s, growth_s, min(self.batch.steps_left, most_steps)))

    def _plan(self, run: StepRun) -> None:
        self.batch.run = run
        self._loop.at(max(run.end_s, self._loop.now_s), self._end_run, run)

    def _cut_run(self) -> None:
        """End the run of steps with the step in progress, because a prefill wants to begin."""
        if self.batch.run is not None and (shorter := self.batch.run.cut(self._loop.now_s)) is not None:
            self._plan(shorter)

    def _end_run(self, run: StepRun) -> None:
        if run is not self.batch.run:
            return  # it was cut
        self.busy_s["decode"] += self._loop.now_s - run.start_s
        self._note("decode", run.start_s, {"batch": len(self.batch), "steps": run.steps})
        self._end_steps(run)
        self._next()

    def _end_steps(self, run: StepRun) -> None:
        """Count finished steps, and finish the requests that have all their tokens."""
        self._has_paused = False
        self._measure(run.steps)
        now_s = self._loop.now_s
        self.batch.finish(run, now_s)
        while (request := self.batch.pop_ended(now_s)) is not None:
            self._finish(request)

    def _measure(self, passes: int) -> None:
        """Passes have ended: compare their times with those that were predicted."""
        if self._times is not None:
            kind, predicted_s, seconds = self._computed
            self._times.measured(kind, predicted_s * passes, seconds * passes)

    def _note_prefills(self, start_s: float) -> None:
        for request, tokens in self._prefilling.in_pass:
            self._note("prefill", start_s, {"session": request.session_id, "tokens": tokens})

    def _note(self, kind: str, start_s: float, detail: dict[str, object]) -> None:
        """Record in the timeline what was computed since `start_s`."""
        if self._spans is not None:
            self._spans.append(Span(self._worker_id, "compute", kind, start_s, self._loop.now_s, detail))
