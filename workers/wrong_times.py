"""One warning when an engine has long taken twice as long as its performance model says, or half as long."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from math import log as logarithm

from ampd.perf.corrections import CorrectedModel
from ampd.types import MOST_FACTOR
from ampd.wire import fields_of
from workers.settings import WorkerSettings

log = logging.getLogger(__name__)

_KINDS = {"prefill": "prefills", "step": "decode steps", "mixed": "mixed passes", "read": "reads of KV"}
"""Those that `ampd profile` measures."""

_FACTOR = 2.0
_CHECK_S = 5.0
_CHECKS = 12
"""In a row. Together they last a minute."""


async def warn_of_wrong_times(
    times: CorrectedModel, settings: WorkerSettings, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Return after the warning."""
    checks = Counter[str]()
    while True:
        await sleep(_CHECK_S)
        factors = fields_of(times.parallelism.factors)
        for kind in _KINDS:
            checks[kind] = checks[kind] + 1 if abs(logarithm(factors[kind])) >= logarithm(_FACTOR) else 0
        if max(checks.values()) >= _CHECKS:
            wrong = [f"{text} {factors[kind]:.2g} times" for kind, text in _KINDS.items() if checks[kind] >= _CHECKS]
            log.warning(
                "for a minute %s have taken as long as --perf %s says; predictions are corrected, by a factor of %g at "
                "most. Measure the engine: ampd profile --engine %s --model %s --tp %d --output FILE, and serve with "
                "--perf FILE",
                " and ".join(wrong),
                settings.perf,
                MOST_FACTOR,
                settings.engine,
                settings.model,
                settings.tp,
            )
            return
