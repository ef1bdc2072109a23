"""The failures of a round, by how the coordinator reacts to them."""

from __future__ import annotations

from ampd.wire import OVERLOADED, with_retry_after


class RoundRefusedError(Exception):
    """The round ends with this HTTP status; the message is for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RoundOverloadedError(RoundRefusedError):
    """The round ends with 429, because of load and not because of the request.

    Args:
        retry_after_s: seconds after which the same request has a chance; the message names them in whole seconds.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(OVERLOADED, with_retry_after(message, retry_after_s))


class WorkerLostError(Exception):
    """A worker could not be reached, or its stream ended before the round did. Another worker can take over.

    Attributes:
        has_died: the worker had taken the round, and then died or hung. The round may be the reason.
        start: which start of the worker's engine died, from 1, because an engine that starts again keeps the worker's
            id; None: the worker died as a whole, or did not say.
        is_overloaded: the worker lives and has too much to do: it is lost for this round only.
        lives: the worker lives and only the connection broke: the round may go on there.
    """

    def __init__(
        self,
        worker_id: str,
        message: str,
        *,
        has_died: bool = False,
        start: int | None = None,
        is_overloaded: bool = False,
        lives: bool = False,
    ) -> None:
        super().__init__(f"worker {worker_id}: {message}")
        self.worker_id = worker_id
        self.has_died = has_died
        self.start = start
        self.is_overloaded = is_overloaded
        self.lives = lives


class WorkerRefusedError(Exception):
    """A live worker refused a call with this HTTP status."""

    def __init__(self, worker_id: str, status: int, message: str) -> None:
        super().__init__(message)
        self.worker_id = worker_id
        self.status = status
