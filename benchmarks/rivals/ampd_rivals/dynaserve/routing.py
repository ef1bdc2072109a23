"""DynaServe's split of one prefill between two workers."""

from __future__ import annotations

from ampd.page_keys import PAGE_TOKENS
from ampd.perf.model import PerformanceModel
from ampd.policies.base import RoutingSituation
from ampd.policies.capacity import able
from ampd.policies.estimates import NO_PREFILL_WORKER, history_at, history_read_s, index_of_least, local, queued_s
from ampd.policies.registry import Policy, register
from ampd.types import Route, RouteDecision, RouteEstimate, WorkerView

_PARTS = 16
"""Parts of an increment at whose ends it may be split."""

_LEAST_SHARE = 0.05


@register("routing", "dynaserve")
class DynaServeRouting(Policy):
    """Split a prefill between another worker and the session's own, so that their loads are equal.

    After DynaServe (arXiv 2504.09285), its split of a request into two micro-requests.

    Reads: queue, decode batch and its context, held prefix and longest context of every prefill or mixed worker; the
    same of the session's decode worker; the round's ITL target; prefill, step and transfer times of the performance
    model.

    What the source says: all workers are alike. A request can be split at any of its tokens, those of its output
    included. One worker computes the part before, another one the part behind, and the KV moves between them. The point
    is searched so that both workers get equal loads by predicted times.

    Rule: the candidate is the other worker whose queue ends first. It may compute 0 to 16 sixteenths of the increment,
    in whole pages. A worker's load is the time of its queue and of its part, and the read of history that it lacks. It
    counts as longer by the share of the time that the worker's decode steps need of the ITL target. The split with the
    lowest load of the worker with more of it wins; of equal ones the one with the least elsewhere.

    1. `whole`: nothing, or all of it, elsewhere. All of it elsewhere is a usual remote prefill.
    2. `split`: a part elsewhere.

    Our reading: the second part, and all decoding, are on the session's own worker, because that has the history.
    Sessions are bound to the worker with the least work, by `--binding kv-router`.

    Limits: the output is never split, because running decodes do not move here. The KV moves after the first part, not
    while it is computed. The queue of the own worker does not show the rest before it comes. Only the simulated cluster
    splits. A live graph prefills the whole increment at the other worker.

    Example: `--routing dynaserve`, with `--slicing dynaserve --binding kv-router`
    """

    def route(self, situation: RoutingSituation) -> RouteDecision:
        task, own, model = situation.task, situation.decode, situation.model
        others = [worker for worker in able(task, situation.prefill) if worker.worker_id != own.worker_id]
        if not others:
            return local(own, NO_PREFILL_WORKER)
        ready_s = [_busy_s(situation, worker, queued_s(worker, model)) for worker in others]
        chosen = index_of_least(ready_s, situation.rng)
        other, other_ready_s = others[chosen], ready_s[chosen]
        own_ready_s = _busy_s(situation, own, queued_s(own, model))
        read_s = history_read_s(situation, other)

        def ends_s(tokens: int) -> tuple[float, float]:
            """When the other worker and the own one have done their work, with `tokens` of the increment elsewhere."""
            there_s = other_ready_s + (read_s + _part_s(situation, other, 0, tokens) if tokens else 0.0)
            return there_s, own_ready_s + _part_s(situation, own, tokens, task.incr_tokens - tokens)

        tokens = min(_splits(task.hist_tokens, task.incr_tokens), key=lambda split: (max(ends_s(split)), split))
        there_s, here_s = ends_s(tokens)
        if not tokens:
            estimate = RouteEstimate(Route.LOCAL, own.worker_id, here_s, here_s - own_ready_s, own_ready_s, 0.0)
            return local(own, "whole", (estimate,))
        moved_s = read_s + model.kv_transfer_s(tokens, other.parallelism, own.parallelism)
        total_s, prefill_s = max(there_s, here_s) + moved_s, there_s - other_ready_s
        estimate = RouteEstimate(Route.REMOTE, other.worker_id, total_s, prefill_s, other_ready_s, moved_s)
        if tokens == task.incr_tokens:
            return RouteDecision(Route.REMOTE, other.worker_id, "whole", (estimate,))
        split_tokens = task.hist_tokens + tokens
        return RouteDecision(Route.REMOTE, other.worker_id, "split", (estimate,), split_tokens)


def _splits(hist_tokens: int, incr_tokens: int) -> list[int]:
    """How much of an increment may be computed elsewhere: nothing, up to whole pages of the prompt, or all of it."""
    ends = {(hist_tokens + incr_tokens * part // _PARTS) // PAGE_TOKENS * PAGE_TOKENS for part in range(1, _PARTS)}
    return [0, *sorted(end - hist_tokens for end in ends if end > hist_tokens), incr_tokens]


def _part_s(situation: RoutingSituation, worker: WorkerView, behind_tokens: int, tokens: int) -> float:
    """Time of a part of the increment, behind the history and a part before, beside the worker's decode steps."""
    hist_tokens = situation.task.hist_tokens + behind_tokens
    if not behind_tokens and worker.worker_id != situation.decode.worker_id:
        here = history_at(situation, worker)
        hist_tokens, tokens = here, max(hist_tokens + tokens - here, 0)
    return _busy_s(situation, worker, situation.model.prefill_s(hist_tokens, tokens, worker.parallelism))


def _busy_s(situation: RoutingSituation, worker: WorkerView, seconds: float) -> float:
    """Time of some prefill work beside the steps of the worker's decode batch."""
    if not worker.decode_batch:
        return seconds
    model: PerformanceModel = situation.model
    step_s = model.decode_step_s(worker.decode_batch, worker.decode_context_tokens, worker.parallelism)
    return seconds / max(1.0 - step_s / situation.task.slo.itl_s, _LEAST_SHARE)
