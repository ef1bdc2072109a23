"""Frames of Dynamo's request plane: how they are read and sent, and what an installed Dynamo makes of them."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ampd.call_signatures import Signer
from ampd.cli.serve.graph import dynamo_environment
from router.frames import Answer, Frame, FrameError, FrontendConnection, RawFrame, WorkerFrames, cut_frames
from router.round_errors import WorkerLostError
from tests.waiting import PATIENCE_S

CONTROL = {
    "id": "r1",
    "request_type": "single_in",
    "response_type": "many_out",
    "payload_codec": "msgpack",
    "connection_info": {"transport": "tcp_server", "info": "somewhere"},
    "metadata": {"a": "b"},
}
TAKEN = struct.pack(">I", 0)


def raw(request: Any, checksum: int = 0, path: bytes = b"1/n/coordinator/generate", **control: Any) -> RawFrame:
    head, body = msgspec.json.encode({**CONTROL, **control}), msgspec.msgpack.encode(request)
    return RawFrame(path, b'{"request-id":"r1"}', struct.pack(">QQQ", len(head), len(body), checksum) + head + body)


def acknowledgement(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


# -- reading


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_frames_are_cut_wherever_the_network_cuts_them(piece: int) -> None:
    frames = [raw({"number": number, "tokens": [7] * number}) for number in range(4)]
    stream, buffer, found = b"".join(frame.pack() for frame in frames), bytearray(), []
    for start in range(0, len(stream), piece):
        buffer += stream[start : start + piece]
        found += list(cut_frames(buffer))
    assert (found, buffer) == (frames, b"")


def test_a_frame_that_is_too_long_is_refused_before_it_is_there() -> None:
    with pytest.raises(FrameError, match="a frame of"):
        list(cut_frames(bytearray(struct.pack(">HHI", 0, 0, 1 << 31))))


def test_a_request_is_read_and_gets_another_body() -> None:
    frame = Frame(raw({"old": 1}))
    assert (frame.id(), frame.metadata, frame.request()) == ("r1", {"a": "b"}, {"old": 1})
    sent = frame.with_body(b"2/n/worker/generate", msgspec.msgpack.encode({"new": 2}), {"c": "d"})
    (again,) = cut_frames(bytearray(sent))
    assert again == raw({"new": 2}, path=b"2/n/worker/generate", metadata={"c": "d"})


@pytest.mark.parametrize(
    "changed",
    [
        raw({}, payload_codec="json"),
        raw({}, request_type="many_in"),
        raw({}, version=2),
        raw({}, checksum=1),
        RawFrame(b"", b"{}", b"short"),
        RawFrame(b"", b"none", raw({}).payload),
    ],
)
def test_a_frame_that_is_not_known_is_none(changed: RawFrame) -> None:
    with pytest.raises(FrameError):
        Frame(changed)


def test_a_body_that_cannot_be_read_is_none() -> None:
    whole = raw({"tokens": [1, 2]})
    with pytest.raises(FrameError):
        Frame(whole._replace(payload=whole.payload[:-1])).request()


def test_acknowledgements_go_out_in_the_order_of_the_frames() -> None:
    sent: list[bytes] = []
    answers: list[Answer] = []
    connection = FrontendConnection(lambda _frame, answer: answers.append(answer), set())
    transport: Any = SimpleNamespace(write=sent.append, is_closing=lambda: False)
    connection.connection_made(transport)
    connection.data_received(raw({}).pack() * 3)
    answers[2].give(b"")
    answers[1].give(b"full")
    assert sent == []
    answers[0].give(b"")
    answers[0].give(b"again")
    assert sent == [TAKEN, acknowledgement(b"full"), TAKEN]


# -- workers

Behaviour = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Any]


class Worker:
    """A worker's server. `behave` gets the number of the connection."""

    def __init__(self, behave: Behaviour) -> None:
        self._behave = behave
        self._tasks: set[Any] = set()
        self.connections = 0

    async def __aenter__(self) -> WorkerFrames:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        transport = SimpleNamespace(kind="tcp", address=f"127.0.0.1:{port}/2/n/worker/generate")
        client = SimpleNamespace(instances=lambda: [SimpleNamespace(instance_id=0xAB, transport=transport)])
        self.frames = WorkerFrames(client, Signer((), "coordinator-1"))
        return self.frames

    async def __aexit__(self, *_: object) -> None:
        self.frames.close()
        self._server.close()
        await asyncio.gather(*self._tasks)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._tasks.add(asyncio.current_task())
        await self._behave(self.connections, reader, writer)
        writer.close()


async def take(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer what a request says."""
    buffer = bytearray()
    while data := await reader.read(1 << 16):
        buffer += data
        for frame in cut_frames(buffer):
            writer.write(acknowledgement(Frame(frame).request().get("refusal", "").encode()))


async def send(frames: WorkerFrames, timeout_s: float = PATIENCE_S, worker_id: str = "ab", **request: Any) -> None:
    await frames.send(Frame(raw({})), worker_id, request, timeout_s)


async def test_requests_share_a_kept_connection_and_each_gets_its_own_answer() -> None:
    worker = Worker(take)
    async with worker as frames:
        sends = [send(frames), send(frames, refusal="overloaded"), send(frames)]
        results = await asyncio.gather(*sends, return_exceptions=True)
        await send(frames)
    assert [str(result) for result in results] == ["None", "worker ab: it did not take the round: overloaded", "None"]
    assert worker.connections == 1


async def test_a_connection_that_breaks_is_made_again_once() -> None:
    async def behave(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if number > 1:
            await take(number, reader, writer)
        await reader.read(1)

    worker = Worker(behave)
    async with worker as frames:
        await send(frames)
    assert worker.connections == 2


async def test_a_worker_that_hangs_up_is_lost() -> None:
    async def behave(_: int, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    async with Worker(behave) as frames:
        with pytest.raises(WorkerLostError, match="without an acknowledgement"):
            await send(frames)


async def test_a_worker_that_is_gone_is_lost() -> None:
    worker = Worker(take)
    async with worker as frames:
        pass
    with pytest.raises(WorkerLostError):
        await send(frames)
    with pytest.raises(WorkerLostError, match="not in discovery"):
        await send(frames, worker_id="cd")


async def test_a_worker_that_is_silent_is_lost_and_a_late_answer_is_not_that_of_the_next_request() -> None:
    may_answer = asyncio.Event()

    async def behave(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        await take(1, reader, writer)

    async with Worker(behave) as frames:
        with pytest.raises(WorkerLostError, match="no acknowledgement within"):
            await send(frames, timeout_s=0.05)
        may_answer.set()
        with pytest.raises(WorkerLostError, match="full"):
            await send(frames, refusal="full")


# -- with Dynamo


def run(folder: Path, **environment: str) -> Any:
    """What `tests.harness.frames_process` prints: why it is off, and the answers to three requests."""
    env = {**os.environ, **dynamo_environment(folder / "discovery"), "DYN_TCP_RPC_HOST": "127.0.0.1", **environment}
    command = [sys.executable, "-m", "tests.harness.frames_process"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def at_pipe(*, direct: bool) -> dict[str, Any]:
    return {"at": "pipe", "request": {"direct": direct}, "metadata": {"from": "frontend"}, "has_id": True}


def without_id(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "id"}


def test_the_worker_answers_in_the_place_of_the_coordinator(tmp_path: Path) -> None:
    """Metadata and signature reach it, and so does the client's end. What is not taken goes to the pipe."""
    off_reason, direct, passed, after = run(tmp_path)
    assert off_reason == ""
    assert without_id(direct) == {
        "at": "worker",
        "request": {"direct": True, "decided": True},
        "keys": True,
        "fault": None,
        "metadata": {"from": "frontend", "session": "s"},
        "has_id": True,
    }
    assert without_id(passed) == at_pipe(direct=False)
    assert without_id(after) == at_pipe(direct=True)


def test_nothing_is_handed_on_if_dynamos_frames_differ(tmp_path: Path) -> None:
    off_reason, *answers, after = run(tmp_path, DYN_REQUEST_PLANE_CODEC="json")
    assert "another control message" in off_reason
    assert "json" in off_reason
    assert [without_id(answer) for answer in answers] == [at_pipe(direct=True), at_pipe(direct=False)]
    assert without_id(after) == at_pipe(direct=True)
