"""What a graph that serves does when its processes end."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.serve.processes import GraphWatch, ProcessSpec, Supervisor, lost_part
from ampd.cli.serve.settings import EngineName, ServeSettings
from ampd.errors import RunError
from tests.virtual_time import virtually

NAMES = ("prefill-0", "decode-1", "coordinator-0", "frontend")
SETTINGS = ServeSettings(engine=EngineName.MODELLED, prefill=1, decode=1)
LONG_S = 600.0


class Process:
    """Ends when a test says so. Its id is none that a machine has."""

    pid = 2**30

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002
        return self.code or 0


class Scene:
    """A graph that is watched. `processes`: name -> the last one; `starts`: how often each was started."""

    def __init__(self, folder: Path) -> None:
        self.starts: Counter[str] = Counter()
        self.processes: dict[str, Process] = {}
        self.lines: list[str] = []
        self.discovery = folder / "discovery"
        (self.discovery / "v1" / "instances").mkdir(parents=True)
        self.stopped = asyncio.Event()
        self.supervisor = Supervisor(folder, self._start)
        for name in NAMES:
            self.supervisor.start(ProcessSpec(name, (name,)))
        watch = GraphWatch(SETTINGS, self.supervisor, self.discovery, self.lines.append)
        self.watching = asyncio.create_task(watch.until(self.stopped))

    def _start(self, argv: Any, _environment: Any, log: Path) -> Process:
        log.write_text(f"ERROR {log.name}\n")
        self.starts[argv[0]] += 1
        self.processes[argv[0]] = Process()
        return self.processes[argv[0]]

    async def end(self, name: str) -> None:
        self.processes[name].code = 0
        await asyncio.sleep(LONG_S)


@virtually
async def test_a_frontend_that_ends_starts_again_and_everything_else_goes_on(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for times in range(2, 12):
        await scene.end("frontend")
        assert scene.starts == {**dict.fromkeys(NAMES, 1), "frontend": times}
    assert not scene.watching.done()
    logs = ["frontend.log", *(f"frontend.{number}.log" for number in range(2, 11))]
    assert scene.lines == [
        f"frontend ended with exit code 0: ERROR {log} (log: {tmp_path / log}); it starts again in 1 s" for log in logs
    ]
    scene.stopped.set()
    await scene.watching


@virtually
async def test_a_frontend_that_always_ends_ends_the_graph(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    while not scene.watching.done():
        scene.processes["frontend"].code = 1
        await asyncio.sleep(0.1)
    with pytest.raises(RunError, match=r"no frontend is left: frontend ended with exit code 1.*frontend\.6\.log"):
        await scene.watching
    assert scene.starts["frontend"] == 6
    assert scene.lines[-1].endswith("it does not start again, because it has ended 6 times soon after a start")


@virtually
async def test_what_else_is_lost_while_the_frontend_is_away_ends_the_graph(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.processes["frontend"].code = 0
    await scene.end("coordinator-0")
    with pytest.raises(RunError, match="no coordinator is left"):
        await scene.watching
    assert scene.starts["frontend"] == 1


@pytest.mark.parametrize("name", ["discovery", "discovery/v1/instances"])
@pytest.mark.parametrize("comes_back", [False, True])
@virtually
async def test_a_folder_of_discovery_that_is_deleted_ends_the_graph(
    tmp_path: Path, name: str, comes_back: bool
) -> None:
    scene = Scene(tmp_path)
    await asyncio.sleep(LONG_S)
    gone = tmp_path / name
    gone.rename(tmp_path / "gone")
    if comes_back:
        gone.mkdir()  # as a process does that enters again; the others do not watch it
    await asyncio.sleep(LONG_S)
    with pytest.raises(RunError, match=rf"/{name} was deleted\..*start the graph again"):
        await scene.watching


@pytest.mark.parametrize(
    ("flags", "ended", "lost"),
    [
        ({"pools": "static"}, {"prefill-0"}, None),
        ({"pools": "static"}, {"decode-1"}, "decode worker"),
        ({}, {"decode-1"}, None),
        ({}, {"prefill-0", "decode-1"}, "worker"),
        ({"mixed": 2}, {"mixed-0"}, None),
        ({"mixed": 2, "pools": "static"}, {"mixed-0", "mixed-1"}, "mixed worker"),
        ({"mixed": 1, "decode": 1}, {"decode-0"}, None),
        ({"mixed": 1, "decode": 1, "pools": "static"}, {"decode-0", "mixed-1"}, "decode or mixed worker"),
    ],
)
def test_a_graph_serves_as_long_as_a_worker_may_own_sessions(
    flags: dict[str, Any], ended: set[str], lost: str | None
) -> None:
    assert lost_part(ServeSettings(**flags), ended) == lost
