"""The present state of a cluster: which rounds decode where, and which sessions belong to which worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ampd.policies.base import PoolsSituation
from ampd.recent_load import RecentRound
from ampd.types import Role, WorkerView


@dataclass(frozen=True, slots=True)
class Decoding:
    """A round that decodes now. `tokens`, `token_s`: its output so far and the time between two tokens, estimates."""

    session_id: str
    worker_id: str
    item: RecentRound
    tokens: int
    token_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """A round whose prefill waits or runs. `worker_id`: in whose queue it is; "": that is not known."""

    session_id: str
    worker_id: str
    item: RecentRound
    waited_s: float


@dataclass(frozen=True, slots=True)
class Present:
    """What a replay begins with.

    Attributes:
        owners: session -> the worker that holds its KV as its owner, as far as views tell.
        decoding: the rounds that decode.
        waiting: the rounds whose prefills wait or run.
        held_tokens: session -> the tokens that its owner holds. Where memory is short, they are fewer than its context.
    """

    owners: Mapping[str, str]
    decoding: Sequence[Decoding]
    waiting: Sequence[Waiting]
    held_tokens: Mapping[str, int] = field(default_factory=dict)


NOTHING_PRESENT = Present({}, (), ())
"""An empty cluster."""


def present_state(situation: PoolsSituation) -> Present:
    """Read off the views and the recent load.

    Views tell how many rounds decode on a worker, and not which ones. If a worker holds the session of a round, the
    round is on that worker. The other rounds, mostly first rounds, are spread so that each worker gets its number.
    Rounds that are left over are on their way.
    """
    queued = {task.session_id: view.worker_id for view in situation.workers for task in view.queue}
    owners = _owners(situation.workers)
    running = {name: rounds[-1] for name, rounds in situation.load.items() if rounds[-1].ended_s is None}
    placed = _placed([name for name in running if name not in queued], owners, situation.workers)
    views = {view.worker_id: view for view in situation.workers}
    first_token_s = _first_token_s(situation.workers)
    decoding = [
        _decoding(situation, name, running[name], views[worker_id], first_token_s) for name, worker_id in placed.items()
    ]
    waiting = [
        Waiting(name, queued.get(name, ""), item, max(situation.now_s - item.sent_s, 0.0))
        for name, item in running.items()
        if name not in placed
    ]
    held_tokens = {name: views[worker_id].held_tokens.get(name, 0) for name, worker_id in owners.items()}
    return Present(owners, decoding, waiting, held_tokens)


def _placed(sessions: Sequence[str], owners: Mapping[str, str], workers: Sequence[WorkerView]) -> dict[str, str]:
    """Session -> the worker on which its round decodes. A worker gets as many as its batch holds."""
    free = {view.worker_id: view.decode_batch for view in workers}
    placed: dict[str, str] = {}
    for name in sorted(sessions, key=lambda name: not free.get(owners.get(name, ""))):
        owner = owners.get(name, "")
        worker_id = owner if free.get(owner) else max(free, key=free.__getitem__)
        if not free[worker_id]:
            break
        free[worker_id] -= 1
        placed[name] = worker_id
    return placed


def _first_token_s(workers: Sequence[WorkerView]) -> float:
    """The mean of the measured times to the first token; 0: nothing was measured."""
    count = sum(view.ttft.count for view in workers)
    return sum(view.ttft.mean_s * view.ttft.count for view in workers) / count if count else 0.0


def _decoding(
    situation: PoolsSituation, name: str, item: RecentRound, worker: WorkerView, first_token_s: float
) -> Decoding:
    """The output of a round so far, estimated from the time that it has decoded."""
    model, theta = situation.model, worker.parallelism
    prefill_s = model.prefill_s(item.kept_tokens, max(item.prompt_tokens - item.kept_tokens, 1), theta)
    token_s = worker.itl.mean_s if worker.itl.count else 0.0
    token_s = token_s or model.decode_step_s(max(worker.decode_batch, 1), worker.decode_context_tokens, theta)
    decoded_s = situation.now_s - item.sent_s - max(prefill_s, first_token_s)
    return Decoding(name, worker.worker_id, item, max(round(decoded_s / token_s), 1), token_s)


def _owners(workers: Sequence[WorkerView]) -> dict[str, str]:
    owners: dict[str, str] = {}
    for view in workers:
        if view.role is Role.DECODE:
            owners |= {task.session_id: view.worker_id for task in view.queue}
        if view.role.owns_sessions:
            owners |= {session_id: view.worker_id for session_id, tokens in view.held_tokens.items() if tokens}
    return owners
