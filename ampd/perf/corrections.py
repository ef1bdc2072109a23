"""The times of one worker: those of the performance model, corrected by what the worker has measured.

Each kind of work has a factor. It is the geometric mean of measured over predicted times, in which a measurement counts
by its predicted length, and is forgotten as later ones of its kind come. Only times of the work itself are compared,
never waits.
"""

from __future__ import annotations

from math import exp, expm1, log
from typing import Final

from ampd.perf.model import MixedPasses, PerformanceModel
from ampd.types import LEAST_FACTOR, MOST_FACTOR, Factors, Parallelism

KINDS = ("prefill", "step", "mixed", "read", "load")
"""The kinds, as the fields of `Factors` name them."""

PREFILL: Final = 0
STEP: Final = 1
MIXED: Final = 2
READ: Final = 3
LOAD: Final = 4

MEMORY_S = (20.0, 20.0, 20.0, 2.0, 2.0)
"""By kind, the seconds of work after which a measurement counts 1/e. Noise of 10 % in passes of 0.2 s moves a factor by
less than 1 %."""

PRIOR_SHARE: Final = 0.025
"""Share of the memory for which the prior counts at first. It is forgotten too. After five seconds of passes it counts
8 %."""

_LEAST_S: Final = 1e-9

_STEP_LOG: Final = 0.005
"""The factors that others see change in steps of this size at least, so that predictions can be kept meanwhile."""


class CorrectedModel(PerformanceModel):
    """The times of one worker, for its own decisions. Coordinators get the factors with its view.

    Prefills and mixed passes are alike. What has been measured of one is the prior of the other, so that a worker that
    computes only one of them takes its factor for both.

    Args:
        parallelism: of the worker. Its factors are not read.

    Attributes:
        model: the model that is corrected.
        parallelism: of the worker, with its present factors.
    """

    def __init__(self, model: PerformanceModel, parallelism: Parallelism) -> None:
        self.model = model
        self.parallelism = Parallelism(parallelism.tp, host=parallelism.host)
        self._factors = [1.0] * len(KINDS)
        self._logs = [0.0] * len(KINDS)  # means of what was measured, without the prior
        self._weights_s = [0.0] * len(KINDS)
        self._priors_s = [PRIOR_SHARE * memory_s for memory_s in MEMORY_S]

    def factors(self, parallelism: Parallelism) -> Factors:  # noqa: ARG002 - they are of this worker
        return self.parallelism.factors

    def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return self.model.prefill_s(hist_tokens, incr_tokens, self.parallelism)

    def decode_step_s(self, batch: int, context_tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return self.model.decode_step_s(batch, context_tokens, self.parallelism)

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:  # noqa: ARG002
        """Time of a read by this worker."""
        return self.model.kv_transfer_s(tokens, source, self.parallelism)

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return self.model.reload_s(tokens, self.parallelism)

    def mixed_passes(self, parallelism: Parallelism) -> MixedPasses:  # noqa: ARG002
        return self.model.mixed_passes(self.parallelism)

    def measured(self, kind: int, predicted_s: float, seconds: float) -> None:
        """Work of a kind has taken `seconds` for which this model predicts `predicted_s` now."""
        if predicted_s < _LEAST_S or seconds <= 0.0:
            return
        # By the model's own time, so that what was measured before has no part in what a measurement counts.
        model_s, memory_s = predicted_s / self._factors[kind], MEMORY_S[kind]
        found = log(_bounded(seconds / model_s))
        gained_s = -memory_s * expm1(-model_s / memory_s)
        kept = 1.0 - gained_s / memory_s
        self._priors_s[kind] *= kept
        self._weights_s[kind] = weight_s = self._weights_s[kind] * kept + gained_s
        self._logs[kind] += (found - self._logs[kind]) * gained_s / weight_s
        self._show()

    def adopt(self, factors: Factors) -> None:
        """Take over the factors of passes from the process of the engine, which has measured them."""
        for kind, factor in ((PREFILL, factors.prefill), (STEP, factors.step), (MIXED, factors.mixed)):
            self._logs[kind] = log(factor)
            self._weights_s[kind], self._priors_s[kind] = 1.0, 0.0
        self._show()

    def _show(self) -> None:
        """Make new factors, if they have changed enough."""
        logs = [self._with_prior(each) for each in range(len(KINDS))]
        if any(abs(new - log(old)) >= _STEP_LOG for new, old in zip(logs, self._factors, strict=True)):
            self._factors = [round(_bounded(exp(each)), 4) for each in logs]
            self.parallelism = Parallelism(self.parallelism.tp, Factors(*self._factors), self.parallelism.host)

    def _with_prior(self, kind: int) -> float:
        """The logarithm of a factor. Its prior is its twin's, or that the model is right."""
        is_twin = kind in (PREFILL, MIXED)
        return self._towards(kind, self._towards(PREFILL + MIXED - kind, 0.0) if is_twin else 0.0)

    def _towards(self, kind: int, prior: float) -> float:
        weight_s, prior_s = self._weights_s[kind], self._priors_s[kind]
        return (weight_s * self._logs[kind] + prior_s * prior) / (weight_s + prior_s)


def _bounded(factor: float) -> float:
    return min(max(factor, LEAST_FACTOR), MOST_FACTOR)
