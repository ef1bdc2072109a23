"""The part of the harness inside the processes of the graph: a view for debugging, and faults that can be switched on.

A process answers on a unix socket. A request is a line with a JSON object, and so is the answer:

    {"op": "debug"}                      the figures of this process
    {"op": "arm", "fault": "kv-stall"}   switch a fault on
    {"op": "disarm"}                     switch all faults off
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

SOCKET_VARIABLE = "FAULTS_SOCKET"
"""Environment variable with the path of the process' socket."""

WITHOUT_KV = "known sessions without KV"
"""Figure of sessions whose KV a worker has dropped before they ended. It forgets them after half an hour."""

TASK_EXCEPTION = "task-exception"
KV_FAILS = "kv-fails"
KV_STALLS = "kv-stalls"
KV_COPY_FAILS = "kv-copy-fails"
KV_LIES = "kv-lies"
NONSENSE = "nonsense"
LEAKS_PROTECTION = "leaks-protection"
REPEATS_TOKENS = "repeats-tokens"
ENGINE_BREAKS = "engine-breaks"
ENGINE_HANGS = "engine-hangs"

DEADLY_PROMPT = [299] * 8
"""A prompt that begins so ends the worker that takes it, or with SGLang its engine."""


class Armed:
    """The faults that are switched on in this process, and how often each one has struck since then."""

    def __init__(self) -> None:
        self._faults: set[str] = set()
        self._changed = asyncio.Event()
        self.struck: Counter[str] = Counter()
        self.task_failure = asyncio.Event()

    def arm(self, fault: str) -> None:
        self._faults.add(fault)
        self.struck[fault] = 0
        self._notify()
        if fault == TASK_EXCEPTION:
            self.task_failure.set()
            self.task_failure = asyncio.Event()

    def disarm(self) -> None:
        self._faults.clear()
        self._notify()

    def strikes(self, fault: str) -> bool:
        """Whether a fault is on; if so, this counts as one time that it struck."""
        is_on = fault in self._faults
        self.struck[fault] += is_on
        return is_on

    async def until_disarmed(self) -> None:
        while self._faults:
            await self._changed.wait()

    async def until_armed(self, *faults: str) -> None:
        """Wait until at least one of `faults` is on."""
        while not self._faults.intersection(faults):
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


ARMED = Armed()
"""Of this process."""


async def open_control(figures: Callable[[], dict[str, Any]]) -> asyncio.Server:
    """Answer on the socket that the environment names.

    Args:
        figures: the part of the debug view that the kind of process knows.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            request = json.loads(await reader.readline())
            match request["op"]:
                case "debug":
                    reply = {**figures(), **_process_figures()}
                case "arm":
                    ARMED.arm(request["fault"])
                    reply = {}
                case "disarm":
                    ARMED.disarm()
                    reply = {}
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()

    return await asyncio.start_unix_server(answer, os.environ[SOCKET_VARIABLE])


def session_figures(sessions: Any) -> dict[str, int]:
    """Sessions that a worker keeps KV of, and those that it only knows until their time to live is over."""
    kept = sum(use.is_held or bool(use.running) for use in sessions._uses.values())
    return {"kept sessions": kept, WITHOUT_KV: len(sessions._uses) - kept}


def _process_figures() -> dict[str, Any]:
    own = asyncio.current_task()
    tasks = Counter(_name(task) for task in asyncio.all_tasks() if task is not own)
    rss_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "tasks": dict(tasks),
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "rss_bytes": rss_pages * os.sysconf("SC_PAGE_SIZE"),
        "struck": dict(ARMED.struck),
    }


def _name(task: asyncio.Task[Any]) -> str:
    """The name that the program gave the task, else the name of its function."""
    name = task.get_name()
    if not name.startswith("Task-"):
        return name
    return getattr(task.get_coro(), "__qualname__", name)


def fail_on_demand(work: Callable[[], Any]) -> Callable[[], Any]:
    """The work of a long-lived task, which raises when `TASK_EXCEPTION` is armed."""

    async def failing() -> Any:
        failure = asyncio.create_task(ARMED.task_failure.wait(), name="injected-failure")
        working = asyncio.ensure_future(work())
        try:
            await asyncio.wait({failure, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return await working
            ARMED.struck[TASK_EXCEPTION] += 1
            raise ValueError("injected")
        finally:
            failure.cancel()
            working.cancel()
            await asyncio.wait({failure, working})

    return failing
