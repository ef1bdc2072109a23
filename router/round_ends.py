"""The rounds of this coordinator that workers answer, and the connections over which the workers tell of them."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ampd.background_tasks import BackgroundTasks, InBackground, RoundsInProgress, SupervisedTask
from ampd.call_signatures import RPC_HOST, Verifier
from ampd.round_end import RUNNING_S, Begun, PrefillFailed, RoundEnded, Running, Told, cut_told
from router.round_errors import WorkerLostError

log = logging.getLogger(__name__)

_UNTOLD_S = 3 * RUNNING_S
"""A worker without a connection is asked for its rounds after this time."""
_BROKEN = "its connection broke"
_SENT_AGAIN_S = 30.0
"""In which a frontend sends a round again that a worker has lost."""


class Run(Protocol):
    """A round that a worker has, or had (`router.round_run.RoundRun`)."""

    request_id: str
    given_s: float
    was_answered: bool

    @property
    def worker_id(self) -> str: ...
    @property
    def is_over(self) -> bool: ...
    def told(self, told: RoundEnded | PrefillFailed | Begun) -> None: ...
    def lost(self, error: WorkerLostError) -> None: ...
    def give_up(self) -> None: ...


RunT = TypeVar("RunT", bound=Run)


class RoundEnds(InBackground, Generic[RunT]):
    """Knows which worker has which round.

    Args:
        lost: says what it means that a worker tells nothing more (`WorkerAccess.lost`).

    Attributes:
        in_progress: the rounds that have arrived here and are not over.
        address: where workers find this, as `host:port`; empty before `listen`.
    """

    def __init__(
        self,
        lost: Callable[[str, str], Awaitable[WorkerLostError]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lost_error = lost
        self._clock = clock
        self._runs: dict[str, RunT] = {}
        self._lost: dict[str, tuple[float, RunT]] = {}
        self._connections: dict[str, _WorkerConnection] = {}
        self._server: asyncio.Server | None = None
        self._verifier = Verifier((), "")
        self._asking = BackgroundTasks()
        self._task = SupervisedTask("untold-rounds", self._run)
        self.in_progress = RoundsInProgress()
        self.address = ""

    async def listen(self, keys: tuple[bytes, ...] = ()) -> None:
        """Take the connections of workers.

        Args:
            keys: the secrets of the graph.
        """
        host = os.environ.get(RPC_HOST) or _outer_address()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connected, host, 0)
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        self._verifier = Verifier(keys, self.address)

    async def stop(self) -> None:
        await super().stop()
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections.values()):
            connection.close()
        self.forget_lost(math.inf)

    # -- rounds

    def begins(self, run: RunT) -> None:
        """A round is about to be given to a worker.

        A coordinator that stood still meanwhile serves a round and its next try at once. Nobody waits for one of them.
        """
        other, self._runs[run.request_id] = self._runs.get(run.request_id), run
        if other is not None and other is not run:
            other.told(RoundEnded(run.request_id, "left"))

    def over(self, run: RunT, *, may_come_again: bool = False) -> None:
        """No worker has the round any more. The frontend may send one again that a worker has lost."""
        if self._runs.get(run.request_id) is run:
            del self._runs[run.request_id]
            if may_come_again:
                self._lost[run.request_id] = self._clock() + _SENT_AGAIN_S, run

    async def before(self, request_id: str) -> RunT | None:
        """The earlier try of a round that a worker has lost; None: there was none.

        A frontend sends a round again only if it got no end of it. So a worker that has one in progress is asked.
        """
        if (run := self._runs.get(request_id)) is not None:
            await self._unless_alive(run.worker_id, [run])
            if not run.is_over:
                run.lost(WorkerLostError(run.worker_id, _BROKEN, lives=True))
            run.was_answered = True
        _, lost = self._lost.pop(request_id, (0.0, None))
        return lost

    # -- connections

    def _connected(self) -> _WorkerConnection:
        return _WorkerConnection(self._verifier, self._heard, self._gone)

    def _heard(self, connection: _WorkerConnection, told: Told) -> None:
        if isinstance(told, Running):
            connection.worker_id = told.worker_id
            self._connections[told.worker_id] = connection
        self._told(connection.worker_id, told)

    def _told(self, worker_id: str, told: Told) -> None:
        if isinstance(told, Running):
            self._not_running(self._of(worker_id, older_s=RUNNING_S), set(told.request_ids))
        elif (run := self._runs.get(told.request_id)) is not None and run.worker_id == worker_id:
            run.told(told)

    def _gone(self, connection: _WorkerConnection) -> None:
        worker_id = connection.worker_id
        if self._connections.get(worker_id) is connection:
            del self._connections[worker_id]
            self._asking.spawn(self._unless_alive(worker_id, self._of(worker_id)))

    def _of(self, worker_id: str, older_s: float = 0.0) -> list[RunT]:
        given_s = self._clock() - older_s
        return [run for run in self._runs.values() if run.worker_id == worker_id and run.given_s <= given_s]

    def _not_running(self, runs: Sequence[RunT], running: set[str]) -> None:
        """End the rounds whose end got lost. A client that left before its worker answered leaves such a one."""
        for run in runs:
            if run.request_id not in running:
                run.told(RoundEnded(run.request_id, "left"))

    async def _unless_alive(self, worker_id: str, runs: Sequence[RunT]) -> None:
        """The rounds of a worker are lost, unless it answers another call, or has them no more by then."""
        if not runs or (error := await self._lost_error(worker_id, _BROKEN)).lives:
            return
        for run in self._of(worker_id):
            if run in runs:
                run.lost(error)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(RUNNING_S)
            for worker_id in {run.worker_id for run in self._runs.values()} - self._connections.keys():
                await self._unless_alive(worker_id, self._of(worker_id, older_s=RUNNING_S))
                old = self._of(worker_id, older_s=_UNTOLD_S)
                self._not_running([run for run in old if not run.is_over], set())
            self.forget_lost(self._clock())

    def forget_lost(self, now_s: float) -> None:
        """Give up the lost rounds that no frontend has sent again in time."""
        for request_id, (until_s, run) in list(self._lost.items()):
            if until_s <= now_s:
                del self._lost[request_id]
                run.give_up()


class _WorkerConnection(asyncio.Protocol):
    """From a worker, whose name comes with its first message."""

    def __init__(
        self,
        verifier: Verifier,
        heard: Callable[[_WorkerConnection, Told], None],
        gone: Callable[[_WorkerConnection], None],
    ) -> None:
        self._verifier = verifier
        self._heard = heard
        self._gone = gone
        self._buffer = bytearray()
        self._transport: Any = None
        self.worker_id = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for told in cut_told(self._buffer, self._verifier):
                self._heard(self, told)
        except ValueError as error:
            log.warning("a message of %s is not taken: %s", self.worker_id or "a stranger", error)
            self.close()

    def connection_lost(self, _error: Exception | None) -> None:
        self._gone(self)

    def close(self) -> None:
        self._transport.close()


def _outer_address() -> str:
    """The address of this machine in its network, as Dynamo takes it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        return str(probe.getsockname()[0])
