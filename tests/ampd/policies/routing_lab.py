"""A performance model whose times can be added in the head, and workers to route between."""

import random
from dataclasses import dataclass

from ampd.perf.model import MixedPasses, PerformanceModel
from ampd.policies.registry import create_named
from ampd.types import Parallelism, PrefillTask, Role, RouteDecision, Slo, WorkerView
from tests.ampd.policies import situations


@dataclass(frozen=True)
class PlainModel(PerformanceModel):
    """10 ms a pass and 1 ms a token; 5 ms a step and 1 ms a sequence; 10 us a token moved; 1 us reloaded."""

    def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return (10 + incr_tokens) / 1000 if incr_tokens > 0 else 0.0

    def decode_step_s(self, batch: int, context_tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return (5 + batch) / 1000 if batch > 0 else 0.0

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:  # noqa: ARG002
        return tokens / 100_000

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return tokens / 1_000_000


class SlowHost(PlainModel):
    """A reload takes longer than a computation."""

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return tokens / 100


@dataclass(frozen=True)
class Mixing(PlainModel):
    """As `PLAIN`, with mixed passes that save something."""

    saved: float = 1.0
    context_s_per_token: float = 0.0

    def mixed_passes(self, parallelism: Parallelism) -> MixedPasses:  # noqa: ARG002
        return MixedPasses(self.saved, self.context_s_per_token)


PLAIN = PlainModel()
SLO = Slo(ttft_s=1.0, itl_s=0.04)


def round_of(hist: int, incr: int, slo: Slo = SLO, arrival_s: float = 0.0) -> PrefillTask:
    return PrefillTask("t", "s", hist, incr, arrival_s, slo)


def queue_of(*incr_tokens: int) -> tuple[PrefillTask, ...]:
    return tuple(PrefillTask(f"q{i}", f"other{i}", 0, incr, 0.0, SLO) for i, incr in enumerate(incr_tokens))


def prefill(name: str, *queue: int, decode_batch: int = 0, max_context: int = 0) -> WorkerView:
    return WorkerView(
        name, Role.PREFILL, queue=queue_of(*queue), decode_batch=decode_batch, max_context_tokens=max_context
    )


def decode(*queue: int, batch: int = 0, name: str = "d") -> WorkerView:
    return WorkerView(name, Role.DECODE, queue=queue_of(*queue), decode_batch=batch, decode_context_tokens=1000 * batch)


def route(
    policy: str,
    task: PrefillTask,
    own: WorkerView,
    *workers: WorkerView,
    seed: int = 0,
    now_s: float = 0.0,
    model: PerformanceModel = PLAIN,
) -> RouteDecision:
    return situations.route(create_named("routing", policy), task, own, workers, model, now_s, random.Random(seed))
