"""One engine replica in virtual time: prefill passes come before decode steps, and pause them.

Decode steps are not events. A run of steps is planned up to the first sequence that ends; when somebody comes in
between, the run is cut after the step that is in progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism, RunningRound, Window
from planner.simulator.events import EventLoop
from planner.simulator.gap_window import GapWindow
from planner.simulator.kv_memory import KvMemory
from planner.simulator.outcome import GapRun, Span
from planner.simulator.steps import step_times, steps_s, steps_within

_NEVER = 1 << 60


class Sequence:
    """A request as the engine sees it.

    Attributes:
        prompt_tokens: its whole context; `cached_tokens` of it need not be computed.
        output_tokens: tokens to generate here; 0: only the KV is wanted.
        token_s: when the latest token came out (for a sequence that was prefilled elsewhere: its first one).
        first_token_s: when the round's first token came out, here or elsewhere; below 0: not yet.
        staged_tokens: KV behind the cached tokens that was read from a peer and waits in staging memory.
        on_first, on_done: called with the sequence when its first token here, and its last, is out.
    """

    __slots__ = (
        "cached_tokens",
        "end_step",
        "first_token_s",
        "is_handed_over",
        "on_done",
        "on_first",
        "output_tokens",
        "prompt_tokens",
        "session_id",
        "staged_tokens",
        "token_s",
    )

    def __init__(
        self,
        session_id: str,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        on_first: Callable[[Sequence, float], None] | None,
        on_done: Callable[[Sequence, float], None],
        staged_tokens: int = 0,
        token_s: float = -1.0,
    ) -> None:
        self.session_id = session_id
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.staged_tokens = staged_tokens
        self.output_tokens = output_tokens
        self.on_first = on_first
        self.on_done = on_done
        self.token_s = self.first_token_s = token_s
        self.is_handed_over = token_s >= 0.0
        self.end_step = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def behind_tokens(self) -> int:
        """KV that is there when the prefill pass begins."""
        return self.prompt_tokens - self.missing_tokens

    @property
    def missing_tokens(self) -> int:
        """What a prefill pass has to compute, at least the last token of the prompt."""
        return max(self.prompt_tokens - self.cached_tokens - self.staged_tokens, 1)


class SimulatedEngine:
    """The time line of one replica.

    Args:
        chunk_tokens: 0: prefills run whole; else they advance by so many tokens a pass, together with the decode batch.
        hand_over_pass: a sequence whose KV was read from a peer has its last tokens computed in a prefill pass (as
            SGLang does); else the next step of the batch computes them.
        steps_at_once: longest run of decode steps between two events; 1 is stepping token by token.
        spans: where to note what was done when; None: nowhere.
    """

    def __init__(
        self,
        worker_id: str,
        parallelism: Parallelism,
        model: PerformanceModel,
        memory: KvMemory,
        loop: EventLoop,
        window_s: float,
        gaps: list[GapRun],
        *,
        chunk_tokens: int = 0,
        hand_over_pass: bool = True,
        steps_at_once: int = _NEVER,
        spans: list[Span] | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._parallelism = parallelism
        self._model = model
        self._memory = memory
        memory.on_room = self._room
        self._loop = loop
        self._gaps = gaps
        self._chunk_tokens = chunk_tokens
        self._hand_over_pass = hand_over_pass
        self._steps_at_once = steps_at_once
        self._spans = spans
        self._itl = GapWindow(window_s)
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._chunked_tokens = 0
        self._busy = False
        self._is_ending_pass = False
        self._late: list[Sequence] = []
        # The decode batch: a heap by the step in which a sequence ends.
        self._batch: list[tuple[int, int, Sequence]] = []
        self._fresh: list[Sequence] = []
        self._entered = 0
        self._context_tokens = 0
        self._steps_done = 0
        self._last_step_s = 0.0
        # The run of steps in progress.
        self._run_start_s = 0.0
        self._run_first_s = 0.0
        self._run_growth_s = 0.0
        self._run_steps = 0
        self._run_version = 0

    # -- what others may know

    def itl(self, now_s: float) -> Window:
        """Windowed ITL, the run in progress included."""
        if not self._run_steps:
            return self._itl.read(now_s)
        done = min(steps_within(self._run_first_s, self._run_growth_s, now_s - self._run_start_s), self._run_steps)
        return self._itl.read(now_s, tuple(self._run_entries(done)) if done else ())

    def decode_load(self, now_s: float) -> tuple[int, int]:
        """(sequences in the decode batch, their context in tokens)."""
        batch = len(self._batch)
        if not self._run_steps:
            return batch, self._context_tokens
        done = min(steps_within(self._run_first_s, self._run_growth_s, now_s - self._run_start_s), self._run_steps)
        return batch, self._context_tokens + done * batch

    def running(self, now_s: float, itl_slo_s: float) -> list[RunningRound]:
        """The rounds whose first token is out, those that wait for their hand-over pass included."""
        steps = self._steps_done
        if self._run_steps:
            elapsed_s = now_s - self._run_start_s
            steps += min(steps_within(self._run_first_s, self._run_growth_s, elapsed_s), self._run_steps)
        rounds = [
            RunningRound(
                one.output_tokens + one.is_handed_over - (end_step - steps),
                now_s - one.first_token_s,
                itl_slo_s,
                one.total_tokens - (end_step - steps),
            )
            for end_step, _, one in self._batch
        ]
        handed_over = [one for one in (*self._waiting, *self._prefilling, *self._late) if one.is_handed_over]
        rounds += [RunningRound(1, now_s - one.first_token_s, itl_slo_s, one.prompt_tokens) for one in handed_over]
        return rounds

    # -- requests

    def submit(self, *sequences: Sequence) -> None:
        """Take requests in at once; they run as soon as the memory has room and a pass begins."""
        for sequence in sequences:
            self._memory.keep(sequence.session_id)
        if self._is_ending_pass:
            self._late.extend(sequences)
            return
        self._waiting.extend(sequences)
        if not self._busy:
            self._next()
        elif self._run_steps:
            self._cut_run()

    def _room(self) -> None:
        """Memory has become free: who waits for it gets it after the step in progress."""
        if self._waiting and self._run_steps:
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
        elif self._batch:
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
                # Evicted while it waited: what was read to go behind it is of no use either.
                sequence.cached_tokens, sequence.staged_tokens = held, 0
            was_handed_over = sequence.is_handed_over and sequence.missing_tokens <= memory.page_tokens + 1
            if was_handed_over and not self._hand_over_pass:
                self._join(sequence, 0)
            else:
                self._prefilling.append(sequence)

    def _prefill_pass(self) -> None:
        """Everything that was admitted, whole, in one pass."""
        seconds = self._pass_s(
            [(one.prompt_tokens - one.missing_tokens, one.missing_tokens) for one in self._prefilling]
        )
        self._busy = True
        self._loop.at(self._loop.now_s + seconds, self._end_prefill_pass, self._loop.now_s)

    def _pass_s(self, parts: list[tuple[int, int]]) -> float:
        """Seconds of one pass over (history, increment) parts: as one increment behind their mean history."""
        if len(parts) == 1:
            return self._model.prefill_s(*parts[0], self._parallelism)
        incr_tokens = sum(incr for _, incr in parts)
        hist_tokens = sum(hist * incr for hist, incr in parts) // incr_tokens
        return self._model.prefill_s(hist_tokens, incr_tokens, self._parallelism)

    def _end_prefill_pass(self, start_s: float) -> None:
        done, self._prefilling = self._prefilling, []
        if self._spans is not None:
            for one in done:
                self._note("prefill", start_s, {"session": one.session_id, "tokens": one.missing_tokens})
        self._tell(done)

    def _tell(self, done: list[Sequence]) -> None:
        """Tell the owners of what is prefilled, and begin what comes next.

        What they submit in answer comes too late for that: an engine learns of it while its next step runs.
        """
        self._is_ending_pass = True
        for one in done:
            self._prefilled(one)
        self._is_ending_pass = False
        self._next()
        late, self._late = self._late, []
        self._waiting.extend(late)
        if late and not self._busy:
            self._next()
        elif late and self._run_steps:
            self._cut_run()

    def _prefilled(self, sequence: Sequence) -> None:
        now_s = self._loop.now_s
        if sequence.output_tokens:
            if sequence.is_handed_over:
                self._gap(now_s - sequence.token_s)
            sequence.token_s = now_s
            if not sequence.is_handed_over:
                sequence.first_token_s = now_s
        if sequence.output_tokens > 1:
            self._join(sequence, 1)  # first: whoever's turn comes with its token shares the worker with it
        if sequence.output_tokens and sequence.on_first is not None:
            sequence.on_first(sequence, now_s)
        if sequence.output_tokens <= 1:
            self._finish(sequence)

    def _join(self, sequence: Sequence, produced: int) -> None:
        """Into the decode batch, with the tokens that came out so far."""
        self._entered += 1
        sequence.end_step = self._steps_done + sequence.output_tokens - produced
        heappush(self._batch, (sequence.end_step, self._entered, sequence))
        self._fresh.append(sequence)
        self._context_tokens += sequence.prompt_tokens + produced

    def _finish(self, sequence: Sequence) -> None:
        # The last token was put out but never read, so it has no KV yet.
        self._memory.settle(sequence.session_id, sequence.total_tokens - bool(sequence.output_tokens))
        sequence.on_done(sequence, self._loop.now_s)

    # -- chunked prefill: every pass is a step of the batch too

    def _chunk_pass(self) -> None:
        """Up to `chunk_tokens` of the oldest prefills, and one step of the decode batch, in one pass."""
        room, parts = self._chunk_tokens, []
        for position, one in enumerate(self._prefilling):
            before = self._chunked_tokens if position == 0 else 0
            tokens = min(one.missing_tokens - before, room)
            parts.append((one.behind_tokens + before, tokens))
            room -= tokens
            if not room:
                break
        batch = len(self._batch)
        seconds = self._pass_s([*parts, (0, batch)] if batch else parts)
        if batch:
            # The batch's tokens share the pass's reading of the weights; their attention comes on top.
            seconds += self._model.decode_step_s(batch, self._context_tokens, self._parallelism)
            seconds -= self._model.decode_step_s(batch, 0, self._parallelism)
        self._busy = True
        self._loop.at(self._loop.now_s + seconds, self._end_chunk_pass, (self._loop.now_s, parts))

    def _end_chunk_pass(self, passed: tuple[float, list[tuple[int, int]]]) -> None:
        start_s, parts = passed
        now_s = self._loop.now_s
        if self._spans is not None:
            for one, (_, tokens) in zip(self._prefilling, parts, strict=False):
                self._note("prefill", start_s, {"session": one.session_id, "tokens": tokens})
        if self._batch:
            self._run_start_s, self._run_first_s, self._run_growth_s = start_s, now_s - start_s, 0.0
            self._commit(1)
        done: list[Sequence] = []
        for position, (_, tokens) in enumerate(parts):
            one = self._prefilling[position]
            before = self._chunked_tokens if position == 0 else 0
            if before + tokens < one.missing_tokens:
                left = before + tokens
                break
            done.append(one)
        else:
            left = 0
        self._chunked_tokens = left
        del self._prefilling[: len(done)]
        self._tell(done)

    # -- decode

    def _decode_run(self) -> None:
        """Plan steps up to the first sequence that ends."""
        self._busy = True
        self._run_start_s = self._loop.now_s
        self._run_first_s, self._run_growth_s = step_times(
            self._model, len(self._batch), self._context_tokens, self._parallelism
        )
        self._plan(min(self._batch[0][0] - self._steps_done, self._steps_at_once))

    def _plan(self, steps: int) -> None:
        self._run_steps = steps
        self._run_version += 1
        end_s = self._run_start_s + steps_s(self._run_first_s, self._run_growth_s, steps)
        self._loop.at(max(end_s, self._loop.now_s), self._end_run, self._run_version)

    def _cut_run(self) -> None:
        """Let only the step in progress finish: somebody wants a prefill."""
        elapsed_s = self._loop.now_s - self._run_start_s
        steps = steps_within(self._run_first_s, self._run_growth_s, elapsed_s) + 1
        if steps < self._run_steps:
            self._plan(steps)

    def _end_run(self, version: int) -> None:
        if version != self._run_version:
            return
        steps = self._run_steps
        if self._spans is not None:
            self._note("decode", self._run_start_s, {"batch": len(self._batch), "steps": steps})
        self._run_steps = 0
        self._commit(steps)
        self._next()

    def _commit(self, steps: int) -> None:
        """Enter finished steps and let go who has all its tokens."""
        batch = self._batch
        for first_end_s, run in self._run_entries(steps):
            self._gaps.append(run)
            self._itl.add(first_end_s, run)
        self._fresh.clear()
        self._steps_done += steps
        self._context_tokens += steps * len(batch)
        self._last_step_s = now_s = self._loop.now_s
        while batch and batch[0][0] <= self._steps_done:
            sequence = heappop(batch)[2]
            self._context_tokens -= sequence.total_tokens
            sequence.token_s = now_s
            self._finish(sequence)

    def _run_entries(self, steps: int) -> list[tuple[float, GapRun]]:
        """The gaps of the first `steps` steps of the run. A pause before it makes the first gap longer, and who has
        just joined the batch waited since its own first token."""
        first_s, growth_s, start_s = self._run_first_s, self._run_growth_s, self._run_start_s
        batch, fresh = len(self._batch), self._fresh
        first_end_s = start_s + first_s
        pause_s = start_s - self._last_step_s
        if not fresh and pause_s <= 0.0:
            return [(first_end_s, GapRun(first_s, growth_s, steps, batch))]
        entries = [(first_end_s, GapRun(first_end_s - one.token_s, 0.0, 1, 1)) for one in fresh]
        if batch > len(fresh):
            entries.append((first_end_s, GapRun(first_s + pause_s, 0.0, 1, batch - len(fresh))))
        if steps > 1:
            second_s = first_s + growth_s
            entries.append((first_end_s + second_s, GapRun(second_s, growth_s, steps - 1, batch)))
        return entries

    def _gap(self, seconds: float) -> None:
        run = GapRun(seconds, 0.0, 1, 1)
        self._gaps.append(run)
        self._itl.add(self._loop.now_s, run)

    def _note(self, kind: str, start_s: float, detail: dict[str, object]) -> None:
        assert self._spans is not None
        self._spans.append(Span(self._worker_id, "compute", kind, start_s, self._loop.now_s, detail))
