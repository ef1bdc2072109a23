"""Requests that go on to a worker with the frontend's response address, so that no token passes this process.

Dynamo has no call for that, so this module speaks the frames of its TCP request plane. They are private to Dynamo:
`FrameServer.start` compares a frame of the installed Dynamo with what is known here. If they differ, it takes none.

    frame            u16 length, path; u16 length, headers (JSON); u32 length, payload
    payload          u64 length of the control message, u64 length of the body, u64 checksum (0: none); both
    control message  JSON, with the address for the response, which is passed on as it came
    body             msgpack
    acknowledgement  u32 length, error (empty: taken); in the order of the frames
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from dynamo.runtime import Context

from ampd.background_tasks import BackgroundTasks
from ampd.call_signatures import Signer
from ampd.errors import one_line_of
from ampd.wire import COORDINATOR_COMPONENT, COORDINATOR_ENDPOINT, GENERATE_ENDPOINT
from router.round_errors import WorkerLostError

log = logging.getLogger(__name__)

_CHECK_ENDPOINT = "frames.check"
_ASKED, _TOLD = {"token_ids": [1, 2, 3]}, {"token_ids": [4, 5]}
"""The request to itself, as it is sent and as it is handed on."""
_ASKED_WITH, _TOLD_WITH = {"asked": "yes"}, {"asked": "yes", "told": "yes"}
"""The metadata beside it."""
_CHECK_S = 60.0
"""On Kubernetes discovery lists a process only after a probe has found it ready."""
_POLL_S = 0.02
_CONTROL = {"request_type": "single_in", "response_type": "many_out", "payload_codec": "msgpack"}
_CONTROL_FIELDS = {*_CONTROL, "id", "connection_info", "metadata"}

_PATIENCE_S = 0.25
"""After this time a frame is acknowledged although no worker has taken it yet, because those behind it wait."""
_CONNECT_S = 5.0
_BACKLOG = 1024
_MOST_BYTES = 256 << 20
"""Dynamo's own bound is lower, unless it was raised."""

_ATTACH_FILTER = 51
"""SO_ATTACH_REUSEPORT_CBPF, which Python does not name."""
_SECOND_SOCKET = struct.pack("HBBI", 0x06, 0, 0, 1)
"""A filter of one instruction: the connection goes to the second of the sockets that share an address."""

_SIZES = struct.Struct(">QQQ")
_pack, _unpack = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode


class FrameError(Exception):
    """Dynamo's frames, or its listener, are not as this module expects them."""


class RawFrame(NamedTuple):
    """One frame as it came."""

    path: bytes
    headers: bytes
    payload: bytes

    def pack(self) -> bytes:
        sizes = [struct.pack(">H", len(part)) for part in (self.path, self.headers)]
        return b"".join(
            (sizes[0], self.path, sizes[1], self.headers, struct.pack(">I", len(self.payload)), self.payload)
        )


def cut_frames(buffer: bytearray) -> Iterator[RawFrame]:
    """Take the complete frames out of a buffer.

    Raises:
        FrameError: the next one is too long.
    """
    while True:
        ends, end = [], 0
        for size in (2, 2, 4):
            start = end + size
            if len(buffer) < start:
                return
            end = start + int.from_bytes(buffer[end:start], "big")
            ends.append((start, end))
        if end > _MOST_BYTES:
            raise FrameError(f"a frame of {end} bytes")
        if len(buffer) < end:
            return
        with memoryview(buffer) as view:
            frame = RawFrame(*(bytes(view[slice(*part)]) for part in ends))
        del buffer[:end]
        yield frame


class Frame:
    """A frontend's request, and the context of its round (`ampd.telemetry.tracing.TracedContext`).

    Attributes:
        metadata: of the control message. What is added travels on.

    Raises:
        FrameError: it is none of the frames that are known here.
    """

    def __init__(self, raw: RawFrame) -> None:
        try:
            head, _, checksum = _SIZES.unpack_from(raw.payload)
            self._control = msgspec.json.decode(raw.payload[_SIZES.size : _SIZES.size + head], type=dict[str, Any])
            self._headers: dict[str, str] = msgspec.json.decode(raw.headers, type=dict[str, str])
        except (struct.error, msgspec.DecodeError) as error:
            raise FrameError(f"a frame that cannot be read: {error}") from None
        if checksum or not _CONTROL.items() <= self._control.items() or not self._control.keys() <= _CONTROL_FIELDS:
            raise FrameError(f"another control message: {raw.payload[: _SIZES.size + head]!r:.300}")
        self._raw = raw
        self._body = memoryview(raw.payload)[_SIZES.size + head :]
        self.metadata: dict[str, str] = self._control.get("metadata") or {}

    def request(self) -> Any:
        """The body. Raises `FrameError` if it cannot be read."""
        try:
            return _unpack(self._body)
        except msgspec.DecodeError as error:
            raise FrameError(f"a body that cannot be read: {error}") from None

    def with_body(self, path: bytes, body: bytes, metadata: Mapping[str, str]) -> bytes:
        """The frame with another path, body and metadata, and the same response address."""
        control = msgspec.json.encode({**self._control, "metadata": metadata})
        payload = b"".join((_SIZES.pack(len(control), len(body), 0), control, body))
        return RawFrame(path, self._raw.headers, payload).pack()

    def id(self) -> str:
        return str(self._control["id"])

    @property
    def trace_id(self) -> str | None:
        parts = self._headers.get("traceparent", "").split("-")
        return parts[1] if len(parts) > 1 else None

    def trace_headers(self) -> dict[str, str] | None:
        return self._headers if "traceparent" in self._headers else None

    def detached(self, id: str) -> Any:
        """A context for another call of the round."""
        return Context(id, metadata=dict(self.metadata))

    def is_stopped(self) -> bool:
        """Only the worker that answers learns that the client has gone."""
        return False


class Connection(asyncio.Protocol):
    """To one of Dynamo's servers. Frames need not wait for the acknowledgements of those before."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._transport: Any = None
        self.is_lost = False
        self.on_lost: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self, frame: bytes) -> asyncio.Future[bytes]:
        """Send a frame; returns its acknowledgement's error, which is empty if it was taken.

        Raises:
            ConnectionError: the connection is lost. The result has it too.
        """
        if self.is_lost:
            raise ConnectionResetError("the connection is closed")
        acknowledgement: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(acknowledgement)
        self._transport.write(frame)
        return acknowledgement

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4 and len(buffer) >= (end := 4 + int.from_bytes(buffer[:4], "big")) and self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():  # its caller may have gone
                waiting.set_result(bytes(buffer[4:end]))
            del buffer[:end]

    def connection_lost(self, _error: Exception | None) -> None:
        self.is_lost = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(ConnectionResetError("the connection was closed without an acknowledgement"))
        self._waiting.clear()
        self.on_lost()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Address(NamedTuple):
    """Where an instance takes frames."""

    host: str
    port: int
    path: bytes

    @classmethod
    def of(cls, instance: Any) -> Address:
        """Raises `FrameError` if the instance does not use TCP."""
        transport = instance.transport() if callable(instance.transport) else instance.transport
        if transport.kind != "tcp":
            raise FrameError(f"the request plane is {transport.kind}")
        place, _, path = transport.address.partition("/")
        host, _, port = place.rpartition(":")
        return cls(host.strip("[]"), int(port), path.encode())

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_S):
            _, connection = await loop.create_connection(Connection, self.host, self.port)
        return connection


class WorkerFrames:
    """Hands requests on to workers. Connections are kept.

    Args:
        client: Dynamo's client of the workers' endpoint for rounds.
        signer: of the calls.
    """

    def __init__(self, client: Any, signer: Signer) -> None:
        self._client = client
        self._signer = signer
        self._addresses: dict[str, Address] = {}
        self._connections: dict[tuple[str, int], asyncio.Task[Connection]] = {}

    async def send(self, frame: Frame, worker_id: str, request: Mapping[str, Any], timeout_s: float) -> None:
        """Let a worker answer a frontend's request; returns when the worker has taken it.

        A network that forgets connections resets them while the worker lives, so there is a second try.

        Args:
            request: takes the place of the frontend's.

        Raises:
            WorkerLostError: it did not take the request.
        """
        body = _pack(request)
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    refusal = await self._try(frame, worker_id, request, body)
                except ConnectionError:
                    refusal = await self._try(frame, worker_id, request, body)
        except TimeoutError:
            raise WorkerLostError(worker_id, f"no acknowledgement within {timeout_s:g} s") from None
        except (OSError, FrameError) as error:
            raise WorkerLostError(worker_id, one_line_of(error)) from None
        if refusal:
            raise WorkerLostError(worker_id, f"it did not take the round: {refusal.decode(errors='replace')}")

    async def _try(self, frame: Frame, worker_id: str, request: Mapping[str, Any], body: bytes) -> bytes:
        address = self._address(worker_id)
        connection = await self._connection(address)
        metadata = dict(frame.metadata)
        self._signer.sign(metadata, GENERATE_ENDPOINT, worker_id, request)
        return await connection.send(frame.with_body(address.path, body, metadata))

    def _address(self, worker_id: str) -> Address:
        if worker_id not in self._addresses:
            self._addresses = {f"{each.instance_id:x}": Address.of(each) for each in self._client.instances()}
        if worker_id not in self._addresses:
            raise FrameError("it is not in discovery")
        return self._addresses[worker_id]

    async def _connection(self, address: Address) -> Connection:
        place = address.host, address.port
        task = self._connections.get(place)
        if task is None or (task.done() and (task.exception() or task.result().is_lost)):
            task = self._connections[place] = asyncio.create_task(address.connect())
        return await asyncio.shield(task)

    def close(self) -> None:
        """Close the connections."""
        for task in self._connections.values():
            if task.done() and not task.exception():
                task.result().close()


class Answer:
    """The acknowledgement of one frame of a frontend, which goes out after those of the frames before."""

    __slots__ = ("_connection", "error")

    def __init__(self, connection: FrontendConnection) -> None:
        self._connection = connection
        self.error: bytes | None = None

    def take(self) -> None:
        self.give(b"")

    def give(self, error: bytes) -> None:
        if self.error is None:
            self.error = error
            self._connection.flush()

    def fail(self) -> None:
        if self.error is None:
            self._connection.close()


class FrontendConnection(asyncio.Protocol):
    """From a frontend, which takes this process for Dynamo's server."""

    def __init__(self, serve: Callable[[RawFrame, Answer], None], opened: set[FrontendConnection]) -> None:
        self._serve = serve
        self._opened = opened
        self._buffer = bytearray()
        self._answers: deque[Answer] = deque()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._opened.add(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self._opened.discard(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for frame in cut_frames(self._buffer):
                answer = Answer(self)
                self._answers.append(answer)
                self._serve(frame, answer)
        except FrameError as error:
            log.warning("a connection is closed: %s", error)
            self.close()

    def flush(self) -> None:
        """Send the acknowledgements that are next."""
        while self._answers and (error := self._answers[0].error) is not None:
            self._answers.popleft()
            if not self._transport.is_closing():
                self._transport.write(struct.pack(">I", len(error)) + error)

    def close(self) -> None:
        self._transport.abort()


class FrameServer:
    """Takes the requests of frontends in the place of Dynamo's server of this process.

    A second socket at Dynamo's address gets all connections, so nothing in discovery changes, and the end of that
    socket gives them back to Dynamo. A request that is not taken goes on unchanged over a connection that Dynamo's
    server accepted before.

    Args:
        take: decides about a request, and calls its second argument when the frontend may rely on it. True: it was
            handed on. False: Dynamo's handler gets it.

    Attributes:
        off_reason: why no request is taken; empty: they are.
    """

    def __init__(self, take: Callable[[Frame, Callable[[], None]], Awaitable[bool]]) -> None:
        self._take = take
        self._own = Connection()
        self._server: asyncio.Server | None = None
        self._frontends: set[FrontendConnection] = set()
        self._tasks = BackgroundTasks()
        self._serving: asyncio.Future[Any] | None = None
        self._client: Any = None
        self._path = self._check_path = b""
        self._fault: FrameError | None = None
        self.off_reason = "it was not started"

    async def start(self, runtime: Any, namespace: str) -> None:
        """Take requests from now on, if a request to itself shows that the frames are as expected.

        Call it before the endpoint for rounds is served, so that no frontend is connected yet, and when the process is
        ready, because others are not in discovery.
        """
        try:
            async with asyncio.timeout(_CHECK_S):
                endpoint = runtime.endpoint(f"{namespace}.{_CHECK_ENDPOINT}")
                address = await self._serve_check(endpoint)
                self._own = await address.connect()
                self._own.on_lost = self._lost
                in_front = _in_front_of(address.port)
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(self._connected, sock=in_front, backlog=_BACKLOG)
                await self._check(endpoint.connection_id())
                await endpoint.unregister_endpoint_instance()
                self.off_reason = ""
        except Exception as error:
            self._give_back(
                f"no answer within {_CHECK_S:g} s" if isinstance(error, TimeoutError) else one_line_of(error)
            )

    def stop(self) -> None:
        """Let Dynamo's handler get all requests, and Dynamo's server all new connections."""
        self._own.on_lost = lambda: None
        self._give_back("it was stopped")

    def _lost(self) -> None:
        self._turn_off("Dynamo's server closed its connection")
        for connection in list(self._frontends):
            connection.close()

    def _turn_off(self, reason: str) -> None:
        log.warning("rounds are not handed on, so their tokens pass through this coordinator: %s", reason)
        self._give_back(reason)

    def _give_back(self, off_reason: str) -> None:
        self.off_reason = off_reason
        if self._server is not None:
            self._server.close()

    def _connected(self) -> FrontendConnection:
        return FrontendConnection(lambda frame, answer: self._tasks.spawn(self._serve(frame, answer)), self._frontends)

    async def _serve(self, raw: RawFrame, answer: Answer) -> None:
        late = asyncio.get_running_loop().call_later(_PATIENCE_S, answer.take)
        try:
            if await self._was_taken(raw, answer):
                answer.take()
                return
        finally:
            late.cancel()
        try:
            answer.give(await self._own.send(raw.pack()))
        except ConnectionError:
            answer.fail()

    async def _was_taken(self, raw: RawFrame, answer: Answer) -> bool:
        try:
            if raw.path == self._check_path:
                return await self._hand_to_self(Frame(raw))
            if raw.path == self._path and not self.off_reason:
                return await self._take(Frame(raw), answer.take)
        except FrameError as error:
            self._fault = error
        except Exception:
            log.exception("a round could not be handed on")
        return False

    # -- the request to itself

    async def _serve_check(self, endpoint: Any) -> Address:
        """Serve the endpoint that only this process calls; returns where it is listed."""
        if any(name.startswith("DYN_TCP_TLS_") for name in os.environ):
            raise FrameError("Dynamo's requests are encrypted (DYN_TCP_TLS_...)")
        self._serving = asyncio.ensure_future(endpoint.serve_endpoint(_echo))
        self._client = await endpoint.client()
        while endpoint.connection_id() not in self._client.instance_ids():
            await asyncio.wait({self._serving}, timeout=_POLL_S)
            if self._serving.done():
                raise FrameError(f"Dynamo does not serve it: {self._serving.exception()}")
        own = (each for each in self._client.instances() if each.instance_id == endpoint.connection_id())
        address = Address.of(next(own))
        self._check_path = address.path
        place = address.path.rsplit(b"/", 2)[0]
        self._path = b"/".join((place, COORDINATOR_COMPONENT.encode(), COORDINATOR_ENDPOINT.encode()))
        return address

    async def _check(self, number: int) -> None:
        """Send the request, and compare what the handler has got.

        Raises:
            FrameError: the frames are not as expected.
        """
        context = Context(metadata=_ASKED_WITH)
        stream = await self._client.direct(_ASKED, number, annotated=False, context=context)
        replies = [reply async for reply in stream]
        if self._fault:
            raise self._fault
        if replies != [{"id": context.id(), "request": _TOLD, "metadata": _TOLD_WITH}]:
            raise FrameError(f"a request to itself came back as {replies!r:.300}")

    async def _hand_to_self(self, frame: Frame) -> bool:
        if frame.request() != _ASKED or frame.metadata != _ASKED_WITH:
            raise FrameError(f"another request or other metadata: {frame.request()!r:.100}, {frame.metadata!r:.100}")
        return not await self._own.send(frame.with_body(self._check_path, _pack(_TOLD), _TOLD_WITH))


async def _echo(request: Any, context: Any) -> AsyncIterator[Any]:
    yield {"id": context.id(), "request": request, "metadata": dict(context.metadata.items())}


def _in_front_of(port: int) -> socket.socket:
    """A listening socket at the address of Dynamo's socket, which gets all its new connections.

    Raises:
        FrameError: no such socket was found. OSError: the system cannot do that.
    """
    with _listening(port) as dynamos:
        dynamos.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own = socket.socket(dynamos.family)
        try:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                own.setsockopt(socket.SOL_SOCKET, option, 1)
            own.bind(dynamos.getsockname())
            own.listen(_BACKLOG)
            own.setblocking(False)
            code = ctypes.create_string_buffer(_SECOND_SOCKET)
            own.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(code)))
        except OSError:
            own.close()
            raise
    return own


def _listening(port: int) -> socket.socket:
    """A second handle of this process' socket that listens at a port."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it has just been closed
            if link.is_socket():
                found = socket.socket(fileno=os.dup(int(link.name)))
                with suppress(OSError):  # it has no address
                    if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port:
                        return found
                found.close()
    raise FrameError(f"no socket of this process listens at port {port}")
