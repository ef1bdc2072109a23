"""What a local view shows of the queues."""

from __future__ import annotations

from ampd.state.view import ClusterView


def queued(view: ClusterView, worker_id: str) -> list[str]:
    worker = view.worker(worker_id)
    assert worker is not None
    return [task.task_id for task in worker.queue]
