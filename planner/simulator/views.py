"""The workers as coordinators see them: as they are now, or as they were a moment ago."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ampd.state.overlay import SAMPLE_INTERVAL_S, merge
from ampd.types import PrefillTask, WorkerView
from planner.simulator.events import EventLoop
from planner.simulator.worker import SimulatedWorker


class Views(ABC):
    """The shared state as the coordinators read it. No protocol, because compiled calls of a class are faster."""

    @abstractmethod
    def workers(self, coordinator: int) -> Sequence[WorkerView]:
        """All workers, in the order of the cluster."""

    @abstractmethod
    def prefill(self, coordinator: int) -> Sequence[WorkerView]:
        """The workers that take prefills of sessions that others own."""

    @abstractmethod
    def decode(self, coordinator: int) -> Sequence[WorkerView]:
        """The workers that own sessions."""

    @abstractmethod
    def worker(self, coordinator: int, worker: SimulatedWorker) -> WorkerView:
        """One worker."""

    @abstractmethod
    def roles_changed(self) -> None:
        """A worker has taken another role."""

    @abstractmethod
    def entered(self, coordinator: int, worker: SimulatedWorker, task: PrefillTask) -> None:
        """This coordinator has just sent a prefill there."""


class FreshViews(Views):
    """Every coordinator sees every worker as it is."""

    def __init__(self, workers: Sequence[SimulatedWorker], loop: EventLoop) -> None:
        self._loop = loop
        self._workers = workers
        self.roles_changed()

    def roles_changed(self) -> None:
        self._prefill = [worker for worker in self._workers if worker.role.takes_prefills]
        self._decode = [worker for worker in self._workers if worker.role.owns_sessions]

    def workers(self, coordinator: int) -> Sequence[WorkerView]:  # noqa: ARG002
        now_s = self._loop.now_s
        return [worker.view(now_s) for worker in self._workers]

    def prefill(self, coordinator: int) -> Sequence[WorkerView]:  # noqa: ARG002
        now_s = self._loop.now_s
        return [worker.view(now_s) for worker in self._prefill]

    def decode(self, coordinator: int) -> Sequence[WorkerView]:  # noqa: ARG002
        now_s = self._loop.now_s
        return [worker.view(now_s) for worker in self._decode]

    def worker(self, coordinator: int, worker: SimulatedWorker) -> WorkerView:  # noqa: ARG002
        return worker.view(self._loop.now_s)

    def entered(self, coordinator: int, worker: SimulatedWorker, task: PrefillTask) -> None:
        pass


class DelayedViews(Views):
    """A change at a worker is published `delay_s` later. Until then each coordinator adds the prefills it has sent.

    Windows and contexts change by themselves, so they are published at intervals until they are empty. Roles are known
    at once, because a coordinator changes them.
    """

    def __init__(self, workers: Sequence[SimulatedWorker], loop: EventLoop, delay_s: float, coordinators: int) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._workers = workers
        self._published: dict[str, WorkerView] = {}
        self._pending: set[str] = set()
        self._sampling: set[str] = set()
        self._with_sent: list[dict[str, WorkerView]] = [{} for _ in range(coordinators)]
        for worker in workers:
            self._publish(worker)
            worker.on_change = partial(self._changed, worker)

    def roles_changed(self) -> None:
        pass  # every call reads the roles

    def workers(self, coordinator: int) -> Sequence[WorkerView]:
        return [self.worker(coordinator, worker) for worker in self._workers]

    def prefill(self, coordinator: int) -> Sequence[WorkerView]:
        return [self.worker(coordinator, worker) for worker in self._workers if worker.role.takes_prefills]

    def decode(self, coordinator: int) -> Sequence[WorkerView]:
        return [self.worker(coordinator, worker) for worker in self._workers if worker.role.owns_sessions]

    def worker(self, coordinator: int, worker: SimulatedWorker) -> WorkerView:
        view = self._with_sent[coordinator].get(worker.worker_id) or self._published[worker.worker_id]
        if view.role is not worker.role or view.label != worker.label:
            view = replace(view, role=worker.role, label=worker.label)
        return view

    def entered(self, coordinator: int, worker: SimulatedWorker, task: PrefillTask) -> None:
        self._with_sent[coordinator][worker.worker_id] = merge(self.worker(coordinator, worker), [task], ())

    def _changed(self, worker: SimulatedWorker) -> None:
        if worker.worker_id not in self._pending:
            self._pending.add(worker.worker_id)
            self._loop.at(self._loop.now_s + self._delay_s, self._publish, worker)

    def _publish(self, worker: Any) -> None:
        self._pending.discard(worker.worker_id)
        view = worker.view(self._loop.now_s)
        self._published[worker.worker_id] = replace(view, held_tokens=dict(view.held_tokens))
        for with_sent in self._with_sent:
            with_sent.pop(worker.worker_id, None)
        is_moving = view.ttft.count or view.itl.count or view.decode_batch
        if is_moving and worker.worker_id not in self._sampling:
            self._sampling.add(worker.worker_id)
            self._loop.at(self._loop.now_s + max(self._delay_s, SAMPLE_INTERVAL_S), self._sample, worker)

    def _sample(self, worker: SimulatedWorker) -> None:
        self._sampling.discard(worker.worker_id)
        self._publish(worker)
