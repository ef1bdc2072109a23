"""The decode batch of one replica: which requests decode, when they end, and the gaps between their tokens.

A batch that does not change needs no event per token. Step k (from 0) of a run takes `first_s + k * growth_s`, because
the context of every request grows by a token per step and the time of a step is linear in the batch's context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import sqrt

from ampd.types import RunningRound, Window
from planner.simulator.outcome import GapRun
from planner.simulator.request import SimulatedRequest

_Entry = tuple[float, GapRun]
"""(end of the run's first step, the run)."""

_EMPTY = Window()


def steps_s(first_s: float, growth_s: float, steps: int) -> float:
    """Seconds of `steps` consecutive steps."""
    return steps * (first_s + 0.5 * growth_s * (steps - 1))


def steps_within(first_s: float, growth_s: float, elapsed_s: float) -> int:
    """How many steps have ended `elapsed_s` seconds after the first began."""
    if elapsed_s < first_s:
        return 0
    if growth_s <= 0.0:
        steps = int(elapsed_s / first_s)
    else:
        linear_s = first_s - 0.5 * growth_s
        # This form of the root stays exact where the growth is tiny.
        steps = int(2.0 * elapsed_s / (linear_s + sqrt(linear_s * linear_s + 2.0 * growth_s * elapsed_s)))
    # Rounding may have gone either way: `steps_s` decides.
    while steps_s(first_s, growth_s, steps + 1) <= elapsed_s:
        steps += 1
    while steps and steps_s(first_s, growth_s, steps) > elapsed_s:
        steps -= 1
    return steps


@dataclass(slots=True, eq=False)
class StepRun:
    """Consecutive decode steps from `start_s` on."""

    start_s: float
    first_s: float
    growth_s: float
    steps: int

    @property
    def end_s(self) -> float:
        return self.start_s + steps_s(self.first_s, self.growth_s, self.steps)

    def done(self, now_s: float) -> int:
        """Steps that have ended."""
        return min(steps_within(self.first_s, self.growth_s, now_s - self.start_s), self.steps)

    def cut(self, now_s: float) -> StepRun | None:
        """The run up to the end of the step in progress; None if it ends there anyway."""
        steps = steps_within(self.first_s, self.growth_s, now_s - self.start_s) + 1
        return StepRun(self.start_s, self.first_s, self.growth_s, steps) if steps < self.steps else None


class GapWindow:
    """Gaps between tokens that ended in the last `length_s` seconds, over runs of steps instead of single tokens.

    It gives the same values as `ampd.telemetry.windows.SlidingWindow` with every token's gap.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._entries: deque[_Entry] = deque()
        self._sum_s = 0.0
        self._count = 0

    def add(self, first_end_s: float, run: GapRun) -> None:
        """Enter a finished run whose first step ended at `first_end_s`; runs come in the order of their ends."""
        self._entries.append((first_end_s, run))
        self._sum_s += _sum_s(run)
        self._count += run.steps * run.batch

    def read(self, now_s: float, unfinished: Sequence[_Entry] = ()) -> Window:
        """Mean and number of the gaps in the window; of `unfinished` runs, the finished steps count."""
        horizon_s = now_s - self._length_s
        self._drop(horizon_s)
        sum_s, count = self._sum_s, self._count
        for entry in unfinished:
            if (rest := _after(entry, horizon_s)) is not None:
                sum_s += _sum_s(rest[1])
                count += rest[1].steps * rest[1].batch
        return Window(sum_s / count, count) if count else _EMPTY

    def _drop(self, horizon_s: float) -> None:
        entries = self._entries
        while entries and entries[0][0] <= horizon_s:
            entry = entries.popleft()
            self._sum_s -= _sum_s(entry[1])
            self._count -= entry[1].steps * entry[1].batch
            rest = _after(entry, horizon_s)
            if rest is not None:
                entries.appendleft(rest)
                self._sum_s += _sum_s(rest[1])
                self._count += rest[1].steps * rest[1].batch
        if not entries:
            self._sum_s = 0.0


def _sum_s(run: GapRun) -> float:
    return steps_s(run.first_s, run.growth_s, run.steps) * run.batch


def _after(entry: _Entry, horizon_s: float) -> _Entry | None:
    """The part of a run that ended after the horizon."""
    first_end_s, run = entry
    if first_end_s > horizon_s:
        return entry
    # The first step ended before the horizon, and perhaps some steps behind it.
    second_s = run.first_s + run.growth_s
    gone = 1 + (steps_within(second_s, run.growth_s, horizon_s - first_end_s) if run.steps > 1 else 0)
    if gone >= run.steps:
        return None
    rest = GapRun(run.first_s + gone * run.growth_s, run.growth_s, run.steps - gone, run.batch)
    return first_end_s + steps_s(second_s, run.growth_s, gone), rest


class DecodeBatch:
    """The requests that decode, as a heap by the step in which each one ends.

    Attributes:
        context_tokens: context of all requests after the finished steps.
        run: the run of steps in progress; None between runs.
    """

    def __init__(self, window_s: float, gaps: list[GapRun]) -> None:
        """`gaps`: takes all gaps between tokens. `window_s`: length of the window of `itl`."""
        self._gaps = gaps
        self._itl = GapWindow(window_s)
        self._heap: list[tuple[int, int, SimulatedRequest]] = []
        self._fresh: list[SimulatedRequest] = []
        self._entered = 0
        self._steps_done = 0
        self._last_step_s = 0.0
        self.context_tokens = 0
        self.run: StepRun | None = None

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def steps_left(self) -> int:
        """Steps until the first request ends."""
        return self._heap[0][0] - self._steps_done

    def itl(self, now_s: float) -> Window:
        """Windowed ITL, the run in progress included."""
        run = self.run
        if run is None:
            return self._itl.read(now_s)
        done = run.done(now_s)
        return self._itl.read(now_s, self._entries(run, done) if done else ())

    def load(self, now_s: float) -> tuple[int, int]:
        """(requests, their context in tokens)."""
        batch = len(self._heap)
        if self.run is None:
            return batch, self.context_tokens
        return batch, self.context_tokens + self.run.done(now_s) * batch

    def running(self, now_s: float, itl_slo_s: float) -> list[RunningRound]:
        """The rounds of the batch, as slicing policies see them."""
        steps = self._steps_done
        if self.run is not None:
            steps += self.run.done(now_s)
        return [
            RunningRound(
                request.output_tokens + request.is_handed_over - (end_step - steps),
                now_s - request.first_token_s,
                itl_slo_s,
                request.total_tokens - (end_step - steps),
            )
            for end_step, _, request in self._heap
        ]

    def join(self, request: SimulatedRequest, generated_tokens: int) -> None:
        """Add a request that has generated some tokens here."""
        self._entered += 1
        request.end_step = self._steps_done + request.output_tokens - generated_tokens
        heappush(self._heap, (request.end_step, self._entered, request))
        self._fresh.append(request)
        self.context_tokens += request.prompt_tokens + generated_tokens

    def note_gap(self, seconds: float, now_s: float) -> None:
        """Count the gap before a token that no decode step generated."""
        self._add(now_s, GapRun(seconds, 0.0, 1, 1))

    def finish(self, run: StepRun, now_s: float) -> None:
        """Count the steps of a run that ends now. Sequences that have all their tokens stay until `pop_ended`."""
        for first_end_s, gap_run in self._entries(run, run.steps):
            self._add(first_end_s, gap_run)
        self.run = None
        self._last_step_s = now_s
        self._fresh.clear()
        self._steps_done += run.steps
        self.context_tokens += run.steps * len(self._heap)

    def pop_ended(self, now_s: float) -> SimulatedRequest | None:
        """Remove a request whose last token came with the run that ends now; None: there is none left."""
        if not self._heap or self._heap[0][0] > self._steps_done:
            return None
        request = heappop(self._heap)[2]
        self.context_tokens -= request.total_tokens
        request.token_s = now_s
        return request

    def _add(self, first_end_s: float, run: GapRun) -> None:
        self._gaps.append(run)
        self._itl.add(first_end_s, run)

    def _entries(self, run: StepRun, steps: int) -> list[tuple[float, GapRun]]:
        """The gaps of the first `steps` steps of a run, each with the end of its first step.

        A pause before the run makes the first gap longer. A request that has just joined the batch waited since its
        own first token.
        """
        first_s, growth_s, start_s = run.first_s, run.growth_s, run.start_s
        batch, fresh = len(self._heap), self._fresh
        first_end_s = start_s + first_s
        pause_s = start_s - self._last_step_s
        if not fresh and pause_s <= 0.0:
            return [(first_end_s, GapRun(first_s, growth_s, steps, batch))]
        entries = [(first_end_s, GapRun(first_end_s - request.token_s, 0.0, 1, 1)) for request in fresh]
        if batch > len(fresh):
            entries.append((first_end_s, GapRun(first_s + pause_s, 0.0, 1, batch - len(fresh))))
        if steps > 1:
            second_s = first_s + growth_s
            entries.append((first_end_s + second_s, GapRun(second_s, growth_s, steps - 1, batch)))
        return entries
