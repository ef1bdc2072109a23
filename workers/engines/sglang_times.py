"""How long SGLang's passes take: measured in its scheduler, by hooks around two of its methods.

A pass begins when SGLang launches it, or when the pass before it ends if that is later. It ends when SGLang has its
results. The scheduler of rank 0 corrects its own times with that, by which it sizes passes, and tells the worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ampd.perf.corrections import MIXED, PREFILL, STEP, CorrectedModel
from ampd.perf.model import joined_tokens
from workers.engines.sglang_passes import passes_of


@dataclass(frozen=True, slots=True)
class LaunchedPass:
    """A pass that SGLang has launched.

    Attributes:
        parts: (history, new tokens) of each prefill.
        batch, context_tokens: of the step.
    """

    launched_s: float
    parts: list[tuple[int, int]]
    batch: int
    context_tokens: int

    @property
    def kind(self) -> int:
        return (MIXED if self.batch else PREFILL) if self.parts else STEP

    def predicted_s(self, times: CorrectedModel) -> float:
        """Its time as it is predicted now."""
        parallelism = times.parallelism
        if not self.parts:
            return times.decode_step_s(self.batch, self.context_tokens, parallelism)
        if not self.batch:
            return times.prefill_s(*joined_tokens(self.parts), parallelism)
        return times.mixed_pass_s(self.parts, self.batch, self.context_tokens, parallelism)


def launched_pass(batch: Any, now_s: float) -> LaunchedPass | None:
    """A batch of SGLang as a pass; None: its time is not that of its computation, because it also loads KV."""
    if batch.hicache_consumer_index >= 0 or not batch.reqs:
        return None
    mode = batch.forward_mode
    if mode.is_decode():
        return LaunchedPass(now_s, [], len(batch.reqs), _context_tokens(batch.reqs))
    if not mode.is_extend():
        return None
    beside = batch.decoding_reqs or []
    prefills = len(batch.reqs) - len(beside)
    parts = list(zip(batch.prefix_lens[:prefills], batch.extend_lens[:prefills], strict=True))
    return LaunchedPass(now_s, parts, len(beside), _context_tokens(beside))


def _context_tokens(requests: Any) -> int:
    return sum(len(request.origin_input_ids) + len(request.output_ids) for request in requests)


# -- hooks in SGLang's scheduler


def note_launch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler.run_batch`: the result gets the pass."""
    launched = launched_pass(batch, time.monotonic())
    result = original(scheduler, batch, *args, **kwargs)
    result.ampd_launched = launched
    return result


def note_end(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> None:
    """Around `Scheduler.process_batch_result`, which waits for the results."""
    original(scheduler, batch, result)
    now_s = time.monotonic()
    before_s, scheduler.ampd_ended_s = getattr(scheduler, "ampd_ended_s", 0.0), now_s
    launched: LaunchedPass | None = getattr(result, "ampd_launched", None)
    passes = passes_of(scheduler)
    times = passes.times
    if launched is None or times is None:
        return
    known = times.parallelism
    times.measured(launched.kind, launched.predicted_s(times), now_s - max(launched.launched_s, before_s))
    if times.parallelism is not known:
        passes.linker.tell_factors(times.parallelism.factors)
