"""Which processes of a graph the fork server starts, and what happens without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from ampd.cli.serve import starting
from ampd.cli.serve.processes import ProcessSpec, Supervisor, python_module
from ampd.cli.serve.settings import EngineName
from ampd.cli.serve.starting import start_processes, worker_server
from ampd.fork_server import ForkServer, ForkServerError

SPECS = [ProcessSpec(name, python_module(module, [])) for name, module in (("decode-0", "workers"), ("frontend", "f"))]


class Recorded:
    """Notes what it starts."""

    pid = 1

    def __init__(self, names: list[str], how: str) -> None:
        self._names = names
        self._how = how

    def __call__(self, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> Recorded:
        del argv, environment
        self._names.append(f"{output.stem} {self._how}")
        return self

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        del timeout
        return 0


class FakeServer:
    def __init__(self, names: list[str], error: str = "") -> None:
        self._names = names
        self._error = error
        self.start = Recorded(names, "forked")

    def wait_ready(self) -> None:
        self._names.append("ready")
        if self._error:
            raise ForkServerError(self._error)


async def started(tmp_path: Path, server: Any, names: list[str]) -> list[str]:
    lines: list[str] = []
    supervisor = Supervisor(tmp_path, Recorded(names, "as a program"))
    await start_processes(supervisor, cast("ForkServer", server), SPECS, lines.append)
    return lines


async def test_workers_are_forked_and_the_others_do_not_wait_for_the_imports(tmp_path: Path) -> None:
    names: list[str] = []
    assert await started(tmp_path, FakeServer(names), names) == []
    assert names == ["frontend as a program", "ready", "decode-0 forked"]


async def test_without_a_server_all_are_programs(tmp_path: Path) -> None:
    names: list[str] = []
    assert await started(tmp_path, None, names) == []
    assert names == ["decode-0 as a program", "frontend as a program"]


async def test_a_server_that_cannot_serve_costs_the_graph_only_time(tmp_path: Path) -> None:
    names: list[str] = []
    (line,) = await started(tmp_path, FakeServer(names, "there is a GPU"), names)
    assert "there is a GPU" in line
    assert names == ["frontend as a program", "ready", "decode-0 as a program"]


@pytest.mark.parametrize(
    ("engine", "environment", "is_forked"),
    [
        (EngineName.SGLANG, {"OMP_NUM_THREADS": "3"}, True),
        (EngineName.SGLANG, {"CUDA_VISIBLE_DEVICES": "0"}, False),
        (EngineName.MODELLED, {"OMP_NUM_THREADS": "3"}, False),
    ],
)
def test_only_engines_without_gpus_are_forked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: EngineName,
    environment: dict[str, str],
    is_forked: bool,
) -> None:
    made: list[tuple[Any, ...]] = []

    @contextmanager
    def fake(*arguments: Any) -> Iterator[str]:
        made.append(arguments)
        yield "server"

    monkeypatch.setattr(starting, "ForkServer", fake)
    with worker_server(engine, [environment, environment], tmp_path) as server:
        assert (server is not None) == is_forked
    if is_forked:
        ((modules, given, _, _),) = made
        assert modules == ["workers.engines.sglang_preload"]
        assert given["OMP_NUM_THREADS"] == "3", "torch reads it when it is imported"
    else:
        assert made == []
