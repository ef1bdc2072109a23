"""A local prefill in slices: the slicing policy says how it shares the worker with the batch that decodes there."""

from __future__ import annotations

from collections.abc import Callable

from ampd.perf.model import PerformanceModel
from ampd.policies.base import SlicingPolicy
from ampd.types import PrefillTask
from planner.simulator.engine import Sequence
from planner.simulator.events import EventLoop
from planner.simulator.worker import SimulatedWorker


class SlicedPrefill:
    """One local prefill from its turn in the queue to the request that brings its first token.

    Each slice is a request of its own for a growing prefix, without output, as on the live worker: the KV of the slices
    before it is there already.

    Args:
        submit: hands the whole prompt to the engine; called once, when what is left is to be computed in one piece.
    """

    def __init__(
        self,
        task: PrefillTask,
        worker: SimulatedWorker,
        policy: SlicingPolicy,
        model: PerformanceModel,
        loop: EventLoop,
        submit: Callable[[], None],
    ) -> None:
        self._task = task
        self._worker = worker
        self._policy = policy
        self._model = model
        self._loop = loop
        self._submit = submit
        # Between two slices nothing else protects what is there.
        worker.memory.keep(task.session_id)
        self._go_on()

    def _go_on(self, _: object = None) -> None:
        task, memory, now_s = self._task, self._worker.memory, self._loop.now_s
        page = memory.page_tokens
        held = memory.held.get(task.session_id, 0)
        done = min(max(held - task.hist_tokens, 0), task.incr_tokens - 1)
        running = self._worker.engine.running(now_s, task.slo.itl_s)
        chosen = self._policy.slice(task, done, running, self._worker.parallelism, self._model, now_s)
        if chosen.wait_s > 0.0:
            self._loop.at(now_s + chosen.wait_s, self._go_on, None)
            return
        end = max((task.hist_tokens + done + chosen.tokens) // page, held // page + 1) * page
        if chosen.tokens >= task.incr_tokens - done or end >= task.context_tokens:
            self._submit()
            memory.unkeep(task.session_id)
            return
        self._worker.engine.submit(Sequence(task.session_id, end, held // page * page, 0, None, self._sliced))

    def _sliced(self, _: Sequence, __: float) -> None:
        self._go_on()
