"""The most sessions per second that passes one after another allow: worker time over the least time of a session.

    python -m benchmarks.best_layouts.limit --only "toolbench" --seeds 3

The least time is that of the performance model, if all KV is reused, none is moved, no worker ever waits, and each
pass has the size at which a token costs least, even if it misses all targets. So no policy carries more under a load
that lasts. In a load that ends, the last rounds are served after the last arrival: the searches of the main comparison
exceed the limit by a few percent with some seeds. With workers of unequal degree it is an estimate, because it takes
all rounds for alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
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
_LEAST_S = 1e-9
_STEADY_SHARE = 0.35
"""Sessions that last longer, as a share of the arrivals, are still coming to an end when the arrivals are over."""


class LeastWork:
    """The least worker time that prefills and decode steps need, in seconds.

    A pass of several parts takes at least the sum of their least times, also if it is a step of the batch
    (`PerformanceModel.mixed_pass_s`). This is so for the analytic models of `ampd.perf.presets`.
    """

    def __init__(self, model: PerformanceModel, parallelism: Parallelism) -> None:
        self._model = model
        self._parallelism = parallelism
        alone_s: float = min(model.decode_step_s(batch, 0, parallelism) / batch for batch in _BATCHES)
        self._output_token_s = min(alone_s, self._new_token_s(0))
        read_s: float = model.decode_step_s(1, _CONTEXT_TOKENS, parallelism) - model.decode_step_s(1, 0, parallelism)
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
        least_s: float = min(prefill_s(hist_tokens, tokens, self._parallelism) / tokens for tokens in _PASS_TOKENS)
        return least_s


@cache
def most_sessions_per_s(setting: Setting, seed: int) -> float | None:
    """The limit for the sessions that a simulation with this seed has; None: its load ends before it is steady.

    Each worker may do any share of its time for either phase.
    """
    if _mean_lifetime_s(setting) > _STEADY_SHARE * setting.duration_s:
        return None
    about = _limit(setting, setting.workload(_SESSIONS, 0))
    return _limit(setting, setting.sessions(about, seed))


def _mean_lifetime_s(setting: Setting) -> float:
    """How long a session lasts on average whose rounds are all just on target."""
    return fmean(
        sum(setting.ttft_s + setting.itl_s * (each.output_tokens - 1) + each.tool_s for each in session.rounds)
        for session in setting.workload(_SESSIONS, 0)
    )


def _limit(setting: Setting, sessions: Sequence[Session]) -> float:
    times = list(_times(setting, sessions))
    # The linear programme's dual: a price of prefills for which the workers earn least. It is one at which a worker
    # earns as much with either phase.
    prices = [prefill_s / (prefill_s + decode_s) for prefill_s, decode_s in times]
    return min(
        sum(max(price / prefill_s, (1 - price) / max(decode_s, _LEAST_S)) for prefill_s, decode_s in times)
        for price in prices
    )


def _times(setting: Setting, sessions: Sequence[Session]) -> Iterator[tuple[float, float]]:
    """The mean (prefill, decode) seconds of a session, worker by worker."""
    for group in chain.from_iterable(setting.cluster().groups.values()):
        work = _least_work(setting, group.parallelism)
        prefills_s, decodes_s = zip(*map(work.session_s, sessions), strict=True)
        yield from [(fmean(prefills_s), fmean(decodes_s))] * group.replicas


@cache
def _least_work(setting: Setting, parallelism: Parallelism) -> LeastWork:
    return LeastWork(setting.performance_model(), parallelism)


class LimitSettings(Settings):
    """Print the limit of each setting."""

    only: str | None = Field(None, description="Only settings whose names contain one of these, comma-separated.")
    seeds: int = Field(3, ge=1, le=100, description="Seeds of arrivals and lengths.")


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    options = parse_settings(LimitSettings, argv, PROG)
    rows = []
    for setting in settings_named(options.only):
        limits = [most_sessions_per_s(setting, seed) for seed in range(options.seeds)]
        rows.append([f"{setting.name} {setting.gpu}", limit_text(limits)])
    print(markdown_table.table(["setting", "limit, sessions/s"], rows))
    return 0


def limit_text(limits: Sequence[float | None]) -> str:
    """The mean of the seeds; `-` where the load is not steady."""
    known = [limit for limit in limits if limit is not None]
    return f"{fmean(known):.3g}" if known else "-"


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
