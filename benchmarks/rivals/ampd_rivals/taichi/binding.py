"""Where TaiChi's decodes run: on decode-heavy workers, until their memory is full."""

from __future__ import annotations

from ampd.policies.base import BindingSituation
from ampd.policies.estimates import index_of_least, session_memory
from ampd.policies.registry import Policy, register
from ampd.types import PrefillTask, Role, WorkerView

_WATERMARK = 0.95
"""Share of its KV memory up to which a decode worker is chosen."""


@register("binding", "taichi")
class TaiChiBinding(Policy):
    """Bind a session to a decode-heavy worker; to a prefill-heavy one when the memory of the others is full.

    After TaiChi (arXiv 2508.01989), flowing decode scheduling.

    Reads: role, used and total KV memory of every decode and mixed worker (of its KV store, or of its device without
    one).

    What the source says: decodes begin on decode-heavy instances. When the memory of one is fuller than a watermark
    (95 %), its decode with the longest output so far moves to a prefill-heavy instance. It moves back when its time
    per token comes close to the target.

    Rule: among the decode workers whose KV memory, with the prompt in it, is at most 95 % full, the least full. Without
    one, the least full mixed worker, and without mixed workers the least full of all. Of equal workers it takes a
    random one.

    Our reading: sessions take the part of decodes, and the overflow happens when they begin.

    Limits: it moves no session later, neither away nor back, because running decodes do not move here. So the part of
    the source that follows the lengths of outputs is missing.

    Example: `--binding taichi`, with `--routing taichi` and `--slicing taichi`
    """

    def bind(self, situation: BindingSituation) -> str:
        shares = {worker.worker_id: _share(worker, situation.task) for worker in situation.decode}
        light = [worker for worker in situation.decode if worker.role is Role.DECODE]
        roomy = [worker for worker in light if shares[worker.worker_id] <= _WATERMARK]
        heavy = [worker for worker in situation.decode if worker.role is not Role.DECODE]
        among = roomy or heavy or light
        return among[index_of_least([shares[worker.worker_id] for worker in among], situation.rng)].worker_id


def _share(worker: WorkerView, task: PrefillTask) -> float:
    """How full the KV memory is with the prompt in it; 0: its size is not known."""
    used_tokens, capacity_tokens = session_memory(worker)
    return (used_tokens + task.context_tokens) / capacity_tokens if capacity_tokens else 0.0
