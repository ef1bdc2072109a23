"""How a round goes on after a worker failed: which workers it avoids, and where its KV can still be read."""

from __future__ import annotations

import logging

from ampd.serving.local_only import PREFILL_WORKER_LOST, PREFILL_WORKER_REFUSED, RESUMED, local_only
from ampd.wire import OVERLOADED
from router.decision_record import DecisionRecord
from router.placement import Placer
from router.request import RoundRequest
from router.round_errors import RoundRefusedError, WorkerLostError, WorkerRefusedError
from router.worker_deaths import RequestDeaths

log = logging.getLogger(__name__)

UNAVAILABLE = 503
_SERVER_ERROR = 500


class Recovery:
    """The failures of one round, and what follows from them.

    Args:
        retries: lost workers that the round survives.
        deaths: of workers, under this round's request.

    Attributes:
        lost: workers that failed this round, or refused it after its output had begun.
        kv_source: the prefill worker that has the KV of the whole context; None: the decode worker prefills.
        holder: the owner before, if the session moved with this round, or with one that was not completed; it still has
            the KV of the history.
    """

    def __init__(
        self, request: RoundRequest, record: DecisionRecord, placer: Placer, retries: int, deaths: RequestDeaths
    ) -> None:
        self._request = request
        self._record = record
        self._placer = placer
        self._retries = retries
        self._deaths = deaths
        self._failure: str | None = None
        self.lost: set[str] = set()
        self.kv_source: str | None = None
        self.holder: str | None = None

    @property
    def local_only(self) -> str | None:
        """Why the next prefill must run on the decode worker; None: it may run anywhere."""
        return local_only(self._failure, self._request.uncarried)

    async def after_prefill(self, error: WorkerLostError | WorkerRefusedError, *, has_output: bool) -> None:
        """Make ready to prefill locally because a prefill worker failed.

        Args:
            has_output: the client has some of the round's output.

        Raises:
            RoundRefusedError: the round cannot go on.
        """
        if isinstance(error, WorkerRefusedError) and error.status == OVERLOADED:
            if not has_output:
                # Another worker would take on what this one cannot, at the cost of rounds that are on time.
                raise RoundRefusedError(OVERLOADED, str(error))
            self._failure = PREFILL_WORKER_REFUSED
            self.lost.add(error.worker_id)
        elif isinstance(error, WorkerRefusedError) and error.status != UNAVAILABLE:
            self._failure = PREFILL_WORKER_REFUSED
        else:
            self._failure = PREFILL_WORKER_LOST
            self._leave_out(error)
        self._record.retries += 1
        if isinstance(error, WorkerLostError):
            await self._check_death(error)
        log.warning("prefill of session %r failed, going on locally: %s", self._request.session_id, error)

    async def after_decode(self, error: WorkerLostError, emitted_tokens: int, *, has_begun: bool) -> None:
        """Make ready to go on at another decode worker.

        Args:
            emitted_tokens: output tokens of the first choice.
            has_begun: whether the client has got something of any choice.

        Raises:
            RoundRefusedError: the round cannot go on.
        """
        request, record = self._request, self._record
        self._leave_out(error)
        record.retries += 1
        await self._check_death(error)
        if record.retries > self._retries:
            raise RoundRefusedError(UNAVAILABLE, f"{record.retries} workers failed this round; the last one: {error}")
        if has_begun and request.uncarried is not None:
            raise RoundRefusedError(
                UNAVAILABLE,
                f"the decode worker was lost in the middle of the output, and a request with {request.uncarried} "
                f"cannot be continued elsewhere; send it again ({error})",
            )
        # A prefill worker of this round still has the whole context: the next decode worker reads it from there.
        if self.kv_source in self.lost:
            self.kv_source = None
        self._failure = RESUMED if self.kv_source else None
        log.warning("session %r goes on after %d tokens: %s", request.session_id, emitted_tokens, error)

    def unplaced(self, error: RoundRefusedError) -> RoundRefusedError:
        """The error of a round that no worker takes. If one took it and was lost, the request is not at fault."""
        if not self.lost or error.status == OVERLOADED or error.status >= _SERVER_ERROR:
            return error
        return RoundRefusedError(UNAVAILABLE, f"its worker was lost, and no other one can go on: {error}")

    async def _check_death(self, error: WorkerLostError) -> None:
        if error.has_died:
            await self._deaths.add(error)

    def _leave_out(self, error: WorkerLostError | WorkerRefusedError) -> None:
        """The round avoids the worker, unless only its connection broke. All rounds do if it may be dead."""
        if isinstance(error, WorkerLostError) and error.lives:
            return
        self.lost.add(error.worker_id)
        if not (isinstance(error, WorkerLostError) and error.is_overloaded):
            self._placer.suspect(error.worker_id)


def decode_error(
    error: WorkerLostError | WorkerRefusedError, *, has_output: bool
) -> WorkerLostError | RoundRefusedError:
    """The error of a failed decode call: a refusal by a worker that is unavailable counts as its loss.

    So does one because of load if the client has some of the output, because the client would lose that.
    """
    if isinstance(error, WorkerLostError):
        return error
    if error.status == UNAVAILABLE:
        return WorkerLostError(error.worker_id, str(error))
    if error.status == OVERLOADED and has_output:
        return WorkerLostError(error.worker_id, str(error), is_overloaded=True)
    return RoundRefusedError(error.status, str(error))
