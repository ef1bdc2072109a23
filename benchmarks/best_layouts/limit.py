"""The most sessions that any policy can carry: the workers' time over the least time that a session needs.

    python -m benchmarks.best_layouts.limit --only "toolbench"

The least time is that of the performance model, if all KV is reused, none is moved, no worker ever waits, and each pass
has the size at which a token costs least, whatever its latency. So no policy carries more under a load that lasts. In a
load that ends a policy may exceed it a little, because the last rounds are served after the last arrival.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from itertools import chain
from statistics import fmean

from pydantic import Field

from ampd.errors import guarded
from ampd.perf.model import PerformanceModel
from ampd.settings import Settings, parse_settings
from ampd.types import Parallelism
from benchmarks import markdown_table
from benchmarks.best_layouts.entries import settings_named
from benchmarks.policies.settings import Setting
from workloads.trace import Session

PROG = "python -m benchmarks.best_layouts.limit"
_SESSIONS = 400
_HISTORY_STEP_TOKENS = 256
_PASS_TOKENS = (*range(1, 2048), *range(2048, 65_536, 16))
_BATCHES = range(1, 4096)
_CONTEXT_TOKENS = 1_000_000


class LeastWork:
    """The least worker time that prefills and decode steps need, in seconds.

    A pass of several parts takes at least the sum of their least times, also if it is a step of the batch
    (`ampd.policies.passes.mixed_pass_s`).
    """

    def __init__(self, model: PerformanceModel, parallelism: Parallelism) -> None:
        self._model = model
        self._parallelism = parallelism
        alone_s = min(model.decode_step_s(batch, 0, parallelism) / batch for batch in _BATCHES)
        self._output_token_s = min(alone_s, self._new_token_s(0))
        read_s = model.decode_step_s(1, _CONTEXT_TOKENS, parallelism) - model.decode_step_s(1, 0, parallelism)
        self._context_token_s = read_s / _CONTEXT_TOKENS

    def prefill_s(self, hist_tokens: int, incr_tokens: int) -> float:
        """Of `incr_tokens` new tokens behind `hist_tokens` that are there."""
        return incr_tokens * self._new_token_s(hist_tokens // _HISTORY_STEP_TOKENS * _HISTORY_STEP_TOKENS)

    def decode_s(self, steps: int, context_tokens: int) -> float:
        """Of `steps` tokens, whose contexts have `context_tokens` in total."""
        return steps * self._output_token_s + context_tokens * self._context_token_s

    def session_s(self, session: Session) -> tuple[float, float]:
        """Of all (prefills, decode steps) of a session. A prefill brings the first token of its round."""
        prefills_s = decodes_s = 0.0
        for (hist, incr), round_ in zip(session.computed_tokens(), session.rounds, strict=True):
            steps = round_.output_tokens - 1
            prefills_s += self.prefill_s(hist, incr)
            decodes_s += self.decode_s(steps, steps * (hist + incr) + steps * (steps + 1) // 2)
        return prefills_s, decodes_s

    @cache  # noqa: B019  # one object per setting
    def _new_token_s(self, hist_tokens: int) -> float:
        prefill_s = self._model.prefill_s
        return min(prefill_s(hist_tokens, tokens, self._parallelism) / tokens for tokens in _PASS_TOKENS)


@cache
def most_sessions_per_s(setting: Setting) -> float:
    """What no policy exceeds under a load that lasts. Each worker may do any share of its time for either phase."""
    sessions = setting.workload(_SESSIONS, 0)
    times = []
    for group in chain.from_iterable(setting.cluster().groups.values()):
        work = LeastWork(setting.performance_model(), group.parallelism)
        prefills_s, decodes_s = zip(*map(work.session_s, sessions), strict=True)
        times += [(fmean(prefills_s), fmean(decodes_s))] * group.replicas
    # The linear programme's dual: a price of prefills for which the workers earn least. It is one at which a worker
    # earns as much with either phase.
    prices = [prefill_s / (prefill_s + decode_s) for prefill_s, decode_s in times]
    return min(sum(max(price / prefill_s, (1 - price) / decode_s) for prefill_s, decode_s in times) for price in prices)


class LimitSettings(Settings):
    """Print what no policy can exceed."""

    only: str | None = Field(
        None, description="Only settings whose names have one of these parts, separated by commas."
    )


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    options = parse_settings(LimitSettings, argv, PROG)
    rows = [
        [f"{setting.name} {setting.gpu}", f"{most_sessions_per_s(setting):.3g}"]
        for setting in settings_named(options.only)
    ]
    print(markdown_table.table(["setting", "limit of any policy, sessions/s"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
