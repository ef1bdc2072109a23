"""The decode batch of one replica: which requests decode, when they end, and the gaps between their tokens."""

from __future__ import annotations

from heapq import heappop, heappush

from ampd.types import RunningRound, Window
from planner.simulator.gap_window import GapWindow
from planner.simulator.outcome import GapRun
from planner.simulator.request import SimulatedRequest
from planner.simulator.steps import StepRun


class DecodeBatch:
    """The requests that decode, as a heap by the step in which each one ends.

    Attributes:
        context_tokens: context of all requests after the finished steps.
        run: the run of steps in progress; None between runs.
    """

    __slots__ = ("_entered", "_fresh", "_gaps", "_heap", "_itl", "_last_step_s", "_steps_done", "context_tokens", "run")

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
