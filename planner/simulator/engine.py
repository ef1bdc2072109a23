"""One engine replica in virtual time: prefill passes come before decode steps, and pause them.

Decode steps are not events. A run of steps is planned up to the first sequence that ends. A request that comes in
between cuts the run after the step in progress.
"""

from __future__ import annotations

from collections import deque

from ampd.types import RunningRound
from planner.simulator.decode_batch import DecodeBatch
from planner.simulator.events import EventLoop
from planner.simulator.kv_memory import KvMemory
from planner.simulator.options import SimulationOptions
from planner.simulator.outcome import GapRun, Span
from planner.simulator.sequence import EngineSequence
from planner.simulator.steps import EngineTimes, StepRun

LONGEST_RUN_STEPS = 1 << 60
"""Most decode steps between two events. With 1 the engine steps token by token, with the same results, slowly."""


class SimulatedEngine:
    """The time line of one replica.

    Attributes:
        batch: the sequences that decode.

    Args:
        options: `chunk_tokens`, `hand_over_pass` and `window_s` concern the engine.
        gaps: takes all gaps between tokens.
        spans: takes what was computed when; None: it is not recorded.
    """

    def __init__(
        self,
        worker_id: str,
        times: EngineTimes,
        memory: KvMemory,
        loop: EventLoop,
        options: SimulationOptions,
        gaps: list[GapRun],
        spans: list[Span] | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._times = times
        self._memory = memory
        memory.on_room = self._room
        self._loop = loop
        self._chunk_tokens = options.chunk_tokens
        self._hand_over_pass = options.hand_over_pass
        self._spans = spans
        self.batch = DecodeBatch(options.window_s, gaps)
        self._waiting: deque[EngineSequence] = deque()
        self._prefilling: list[EngineSequence] = []
        self._chunked_tokens = 0
        self._busy = False
        self._is_ending_pass = False
        self._late: list[EngineSequence] = []

    def running(self, now_s: float, itl_slo_s: float) -> list[RunningRound]:
        """The rounds with a first token, those that wait for their hand-over pass included."""
        rounds = self.batch.running(now_s, itl_slo_s)
        for sequence in (*self._waiting, *self._prefilling, *self._late):
            if sequence.is_handed_over:
                rounds.append(RunningRound(1, now_s - sequence.first_token_s, itl_slo_s, sequence.prompt_tokens))
        return rounds

    # -- requests

    def submit(self, *sequences: EngineSequence) -> None:
        """Take requests in at once; they run as soon as the memory has room and a pass begins."""
        for sequence in sequences:
            self._memory.keep(sequence.session_id)
        if self._is_ending_pass:
            self._late.extend(sequences)
        else:
            self._enqueue(sequences)

    def _enqueue(self, sequences: tuple[EngineSequence, ...] | list[EngineSequence]) -> None:
        self._waiting.extend(sequences)
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
            if self._chunk_tokens:
                self._chunk_pass()
            else:
                self._prefill_pass()
        elif self.batch:
            self._decode_run()
        else:
            self._busy = False

    def _admit(self) -> None:
        waiting, memory = self._waiting, self._memory
        while waiting:
            sequence = waiting[0]
            session_id = sequence.session_id
            if not memory.reserve(session_id, sequence.total_tokens):
                return
            waiting.popleft()
            memory.unkeep(session_id)
            held = memory.held.get(session_id, 0)
            if held < sequence.cached_tokens:
                # Evicted while it waited: the KV that was read to go behind it is of no use either.
                sequence.cached_tokens, sequence.staged_tokens = held, 0
            was_handed_over = sequence.is_handed_over and sequence.missing_tokens <= memory.page_tokens + 1
            if was_handed_over and not self._hand_over_pass:
                self.batch.join(sequence, 0)
            else:
                self._prefilling.append(sequence)

    def _prefill_pass(self) -> None:
        """Everything that was admitted, whole, in one pass."""
        parts = [(sequence.behind_tokens, sequence.missing_tokens) for sequence in self._prefilling]
        self._busy = True
        now_s = self._loop.now_s
        self._loop.at(now_s + self._times.prefill_pass_s(parts), self._end_prefill_pass, now_s)

    def _end_prefill_pass(self, start_s: float) -> None:
        done, self._prefilling = self._prefilling, []
        for sequence in done:
            self._note_prefill(sequence, sequence.missing_tokens, start_s)
        self._complete(done)

    def _complete(self, done: list[EngineSequence]) -> None:
        """Call the owners of prefilled sequences, and begin what comes next.

        Requests that the owners submit in these calls are too late for it: an engine learns of them during its next
        step.
        """
        self._is_ending_pass = True
        for sequence in done:
            self._prefilled(sequence)
        self._is_ending_pass = False
        self._next()
        late, self._late = self._late, []
        if late:
            self._enqueue(late)

    def _prefilled(self, sequence: EngineSequence) -> None:
        now_s = self._loop.now_s
        if sequence.output_tokens:
            if sequence.is_handed_over:
                self.batch.note_gap(now_s - sequence.token_s, now_s)
            else:
                sequence.first_token_s = now_s
            sequence.token_s = now_s
        if sequence.output_tokens > 1:
            # Before the callback: a prefill that this token releases must see the round in the batch.
            self.batch.join(sequence, 1)
        if sequence.output_tokens and sequence.on_first is not None:
            sequence.on_first(sequence, now_s)
        if sequence.output_tokens <= 1:
            self._finish(sequence)

    def _finish(self, sequence: EngineSequence) -> None:
        # The last token was generated but never read, so it has no KV yet.
        self._memory.settle(sequence.session_id, sequence.total_tokens - bool(sequence.output_tokens))
        sequence.on_done(sequence, self._loop.now_s)

    # -- chunked prefill: every pass is a step of the batch too

    def _chunk_pass(self) -> None:
        """Up to `chunk_tokens` of the oldest prefills, and one step of the decode batch, in one pass."""
        room, before, parts = self._chunk_tokens, self._chunked_tokens, []
        for sequence in self._prefilling:
            tokens = min(sequence.missing_tokens - before, room)
            parts.append((sequence.behind_tokens + before, tokens))
            room -= tokens
            before = 0
            if not room:
                break
        self._busy = True
        now_s = self._loop.now_s
        seconds = self._times.chunk_pass_s(parts, len(self.batch), self.batch.context_tokens)
        self._loop.at(now_s + seconds, self._end_chunk_pass, (now_s, parts))

    def _end_chunk_pass(self, passed: tuple[float, list[tuple[int, int]]]) -> None:
        start_s, parts = passed
        for sequence, (_, tokens) in zip(self._prefilling, parts, strict=False):
            self._note_prefill(sequence, tokens, start_s)
        if self.batch:
            self._end_steps(StepRun(start_s, self._loop.now_s - start_s, 0.0, 1))
        done: list[EngineSequence] = []
        for sequence, (_, tokens) in zip(self._prefilling, parts, strict=False):
            self._chunked_tokens += tokens
            if self._chunked_tokens < sequence.missing_tokens:
                break
            done.append(sequence)
            self._chunked_tokens = 0
        del self._prefilling[: len(done)]
        self._complete(done)

    # -- decode

    def _decode_run(self) -> None:
        """Plan steps up to the first sequence that ends."""
        self._busy = True
        batch = self.batch
        steps = min(batch.steps_left, LONGEST_RUN_STEPS)
        self._plan(self._times.steps(self._loop.now_s, len(batch), batch.context_tokens, steps))

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
        if self._spans is not None:
            self._note("decode", run.start_s, {"batch": len(self.batch), "steps": run.steps})
        self._end_steps(run)
        self._next()

    def _end_steps(self, run: StepRun) -> None:
        """Count finished steps, and finish the sequences that have all their tokens."""
        now_s = self._loop.now_s
        self.batch.finish(run, now_s)
        while (sequence := self.batch.pop_ended(now_s)) is not None:
            self._finish(sequence)

    def _note_prefill(self, sequence: EngineSequence, tokens: int, start_s: float) -> None:
        if self._spans is not None:
            self._note("prefill", start_s, {"session": sequence.session_id, "tokens": tokens})

    def _note(self, kind: str, start_s: float, detail: dict[str, object]) -> None:
        assert self._spans is not None
        self._spans.append(Span(self._worker_id, "compute", kind, start_s, self._loop.now_s, detail))
