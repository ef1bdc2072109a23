"""What can go wrong with a round, told apart by what the coordinator does about it."""

from __future__ import annotations


class RequestError(Exception):
    """The round ends with this HTTP status; the message is for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class WorkerLostError(Exception):
    """A worker could not be reached, or its stream ended before the round did: another one can take over."""

    def __init__(self, worker_id: str, message: str) -> None:
        super().__init__(f"worker {worker_id}: {message}")
        self.worker_id = worker_id


class WorkerRefusedError(Exception):
    """A worker is alive and said no, with the HTTP status that it thinks fits."""

    def __init__(self, worker_id: str, status: int, message: str) -> None:
        super().__init__(message)
        self.worker_id = worker_id
        self.status = status
