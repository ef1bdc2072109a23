"""What processes of one machine tell each other: the fork server, `nvidia-smi`, files of builds and graphs."""

from __future__ import annotations

import csv
import json
import os
import random
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ampd.cli.doctor.machine import judge_gpus
from ampd.cli.serve import local_graphs
from ampd.cli.serve.devices import parsed
from ampd.compiled import hash_of, notes_in, source_of
from ampd.fork_server import ForkedProcess, ForkServer, ForkServerError, _checked, _receive
from ampd.state.embedded import FOLDER_PREFIX
from benchmarks.fuzz.mutations import changed_bytes, changed_json, changed_text
from benchmarks.fuzz.target import Target

_HEADER_BYTES = 8
_STARTED = 4711
_REQUESTS: tuple[dict[str, Any], ...] = (
    {"argv": [sys.executable, "-m", "workers", "--tp", "1"], "environment": {"HOME": "/", "A": ""}, "folder": "/"},
    {"ended": _STARTED},
)
_LISTING = "0, NVIDIA H200, 143771, 12, 570.86.15\n1, NVIDIA H200, 143771, [N/A], 570.86.15\n"
_GRAPH: dict[str, Any] = {
    "namespace": "n", "state_url": "unix:///tmp/none/redis.sock", "url": "http://127.0.0.1:8000", "perf": "tiny-cpu",
    "controls": ["http://127.0.0.1:9090"],
}  # fmt: skip
_NOTES = {name: hash_of(source_of(name)) for name in ("ampd.types", "ampd.wire")}


def targets(folder: Path) -> Iterator[Target]:
    """The receivers. `folder`: for files."""
    yield Target(
        "request to the fork server", lambda rng: _message(rng, rng.choice(_REQUESTS)), _receive_request, _LOST
    )
    yield Target("answer of the fork server", _answers, partial(_start, folder), (ForkServerError,))
    yield Target(
        "listing of GPUs", lambda rng: changed_text(rng, changed_text(rng, _LISTING)), _list, (ValueError, csv.Error)
    )
    yield Target("file of a local graph", lambda rng: _data(rng, _GRAPH), partial(_find_graph, folder), ())
    yield Target("notes of a build", lambda rng: _data(rng, _NOTES), partial(_read_notes, folder), ())


_LOST = (EOFError, ConnectionError)
"""After which the server ends what it has started, and itself."""


def _data(rng: random.Random, value: Any) -> bytes:
    data = changed_json(rng, value).encode("utf-8", "surrogatepass")
    return changed_bytes(rng, data) if rng.random() < 0.2 else data


def _message(rng: random.Random, value: Any) -> bytes:
    body = _data(rng, value) if rng.random() < 0.8 else json.dumps(value).encode()
    data = len(body).to_bytes(_HEADER_BYTES, "big") + body
    return changed_bytes(rng, data) if rng.random() < 0.2 else data


def _receive_request(data: bytes) -> None:
    """What is taken names a program of this interpreter's kind, or a process that was started here."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(theirs, [data[:_HEADER_BYTES]], [0]) if data else None
        theirs.sendall(data[_HEADER_BYTES:])
        theirs.shutdown(socket.SHUT_WR)
        received, descriptors = _receive(ours)
    for descriptor in descriptors:
        os.close(descriptor)
    request = _checked(received, descriptors, {_STARTED})
    if "ended" in request:
        assert request["ended"] == _STARTED
        return
    assert request["argv"][1] == "-m"
    assert all(isinstance(word, str) for word in request["argv"])
    assert all(isinstance(value, str) for item in request["environment"].items() for value in item)


def _answers(rng: random.Random) -> tuple[bytes, bytes]:
    """That it is ready, and then a process or an exit code."""
    ready, answer = (_message(rng, value) if rng.random() < 0.5 else _encoded(value) for value in ("", os.getpid()))
    return ready, answer


def _encoded(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


def _start(folder: Path, answers: tuple[bytes, bytes]) -> None:
    ours, theirs = socket.socketpair()
    server = ForkServer.__new__(ForkServer)
    server._socket, server._lock, server._is_ready = ours, threading.Lock(), False
    server._process = SimpleNamespace(pid=1)  # type: ignore[assignment]
    with ours, theirs:
        theirs.sendall(b"".join(answers))
        theirs.shutdown(socket.SHUT_WR)
        server.wait_ready()
        process = server.start([sys.executable, "-m", "workers"], {}, folder / "output")
        with closing(_Descriptor(process)):
            assert process.pid > 0
        assert isinstance(server.exit_code(process.pid), int)


class _Descriptor:
    def __init__(self, process: ForkedProcess) -> None:
        self._process = process

    def close(self) -> None:
        os.close(self._process._descriptor)


def _list(listing: str) -> None:
    gpus = parsed(listing)
    assert not gpus or judge_gpus(gpus, "12.8", len(gpus), 1).found
    assert all(gpu.index >= 0 and gpu.memory_mib >= 0 for gpu in gpus)


def _find_graph(folder: Path, data: bytes) -> None:
    """A graph is found only if its Redis answers, and none answers here."""
    place = folder / f"{FOLDER_PREFIX}x"
    place.mkdir(exist_ok=True)
    (place / "graph.json").write_bytes(data)
    with patch.object(local_graphs, "servers_folder", lambda: folder):
        assert local_graphs.local_graphs() == []


def _read_notes(folder: Path, data: bytes) -> None:
    """No build is used whose notes are not those of the present sources."""
    (folder / "hashes.json").write_bytes(data)
    notes = notes_in(folder / "hashes.json")
    if notes and all(hash_of(source_of(name)) == noted for name, noted in notes.items()):
        assert notes.items() <= _NOTES.items()
