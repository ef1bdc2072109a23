"""What SGLang's scheduler knows of a request for the sizes of its passes: how a `PassShare` gets there.

It travels in the sampling parameter `custom_params`, which SGLang passes on as it is. Nothing else reads it, because no
request of ours has a logit processor of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampd.types import PrefillTask, Slo
from workers.engines.base import PassShare

_KEY = "ampd_share"


def share_params(share: PassShare | None, *, tells: bool = True) -> dict[str, Any]:
    """The sampling parameters that bring `share` to the scheduler; none without it.

    Args:
        tells: whether the worker wants to know of the request's last pass, if anyone does.
    """
    if share is None:
        return {}
    task = share.task
    # A flat dictionary of numbers and strings, because SGLang passes on nothing else.
    fields = {
        "task_id": task.task_id,
        "session_id": task.session_id,
        "hist_tokens": task.hist_tokens,
        "incr_tokens": task.incr_tokens,
        "arrival_s": task.arrival_s,
        "ttft_s": task.slo.ttft_s,
        "itl_s": task.slo.itl_s,
        "postponements": task.postponements,
        "session_missed": task.session_missed,
        "has_output": task.has_output,
        "first_s": share.first_s,
        "tells": tells and share.on_last_pass is not None,
    }
    return {"custom_params": {_KEY: fields}}


@dataclass(slots=True)
class Known:
    """What the scheduler knows of one request.

    Attributes:
        task: what was left of its prefill when the worker sent it; None: a request without targets.
        is_handed_over: its first token came elsewhere.
        first_s: when its first token came; None: it has not.
        tells: the worker wants to know of its last pass.
    """

    task: PrefillTask | None = None
    is_handed_over: bool = False
    first_s: float | None = None
    tells: bool = False


def known(request: Any) -> Known:
    """What is known of a request of SGLang. It is kept with the request, because every pass asks again."""
    found: Known | None = getattr(request, "ampd_known", None)
    if found is None:
        found = request.ampd_known = _read((request.sampling_params.custom_params or {}).get(_KEY))
    return found


def _read(fields: Mapping[str, Any] | None) -> Known:
    if fields is None:
        return Known()
    task = PrefillTask(
        fields["task_id"],
        fields["session_id"],
        fields["hist_tokens"],
        fields["incr_tokens"],
        fields["arrival_s"],
        Slo(fields["ttft_s"], fields["itl_s"]),
        fields["postponements"],
        fields["session_missed"],
        fields["has_output"],
    )
    first_s = fields["first_s"]
    return Known(task, first_s is not None, first_s, fields["tells"])
