"""Tasks and a model whose times are exact, for orderings by one number per task."""

import random
from collections.abc import Sequence

from ampd.perf.model import PerformanceModel
from ampd.policies.base import Pick
from ampd.policies.registry import create
from ampd.types import Parallelism, PrefillTask, Slo
from tests.ampd.policies import situations

TP1 = Parallelism(1)
NOW_S = 64.0


class LinearModel(PerformanceModel):
    """One new token takes 1/1024 s, one of history 1/4096 s: times are exact."""

    def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return incr_tokens / 1024 + hist_tokens / 4096 if incr_tokens else 0.0

    def decode_step_s(self, batch: int, context_tokens: int, parallelism: Parallelism) -> float:
        raise NotImplementedError

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:
        raise NotImplementedError

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:
        raise NotImplementedError


MODEL: PerformanceModel = LinearModel()


def task(name: str, incr: int, waited_s: float = 0.0, hist: int = 0, ttft_s: float = 1.0) -> PrefillTask:
    return PrefillTask(name, name, hist, incr, NOW_S - waited_s, Slo(ttft_s, 0.1))


def pick(policy: str, queue: Sequence[PrefillTask], now_s: float = NOW_S, **parameters: object) -> Pick:
    return situations.pick(create("ordering", policy, **parameters), queue, TP1, MODEL, now_s, random.Random(0))
