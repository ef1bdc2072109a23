"""A slicing policy whose answers stand in the targets of the prefill: each request of a test brings its own.

The module `told_policy` registers it. Only processes of an engine import that, because a process that does knows one
policy more than the documents describe.
"""

from __future__ import annotations

import sys
from typing import Any

from ampd.policies.base import SlicingSituation
from ampd.policies.registry import Policy
from ampd.types import PrefillTask, Slo

FAILS = 10**9
"""A number of tokens that makes the policy fail."""


class ToldSlices(Policy):
    """Compute as many tokens as the TTFT target has seconds, after as many tokens of the batch as the ITL target has.

    Ranks but the first would compute more, so they must not ask.
    """

    def slice(self, situation: SlicingSituation) -> int:
        slo = situation.task.slo
        if slo.ttft_s == FAILS:
            raise ValueError("told to fail")
        if situation.running and max(round_.tokens for round_ in situation.running) < slo.itl_s:
            return 0
        return int(slo.ttft_s) + 64 * _rank()


def _rank() -> int:
    torch: Any = sys.modules.get("torch")  # also where it is not installed
    return torch.distributed.get_rank() if torch and torch.distributed.is_initialized() else 0


def told(tokens: int, after: int = 0, hist_tokens: int = 0, incr_tokens: int = 1) -> PrefillTask:
    """A prefill whose passes take so many tokens, once a round of the batch has `after` tokens."""
    return PrefillTask("t", "s", hist_tokens, incr_tokens, 0.0, Slo(float(tokens), float(after)))
