"""Samples of every process: memory, descriptors, sockets, threads, and what the harness inside it counts."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from benchmarks.faults.cluster import LiveGraph, Member
from benchmarks.faults.sglang_worker import FORGET_S
from benchmarks.soak.trend import NIXL_PEERS, NOT_JUDGED, UNSETTLED, Point

REDIS = "redis"
_ANSWER_S = 2.0
"""A process that is stopped does not answer; its next sample has the figures again."""
_NOT_NUMBERS = ("struck", "connected", "workers", "tasks", "rss_bytes", "descriptors", "engine processes")
_KIB = 1024

_BEHIND_RELAY = "Dynamo's "
"""Beginning of the names of a frontend's figures that are not of the status relay, but of the process behind it."""

_PER_WORKER = (
    *(f"{part}{figure}" for part in ("", _BEHIND_RELAY) for figure in ("sockets", "descriptors")),
    "connections",
    "keys worker",
    "keys queue",
)
"""Figures that follow the number of processes, which churn changes. They have another name then."""

NIXL_PEERS_BEYOND = "NIXL peers beyond the workers"
"""Peers that a worker would know although none of its own rules keeps them.

A worker forgets peers from which nothing was read for `FORGET_S`, when it meets another one. So it never knows more
than the most workers that ran within such a time. Below that bound their number follows churn."""

SETTLED_S = 5.0
"""How long the usual processes have served before connections between them count.

A worker that replaces another one is a process long before the others are connected with it."""


class Sampler:
    """Takes a sample of each process every `interval_s`, from the start to the end of its context.

    Attributes:
        series: (process, figure) -> points.
        file: all samples, as lines of JSON; None: none is written.
    """

    def __init__(self, graph: LiveGraph, interval_s: float, file: Path | None) -> None:
        self.series: dict[tuple[str, str], list[Point]] = defaultdict(list)
        self.file = file
        self.start_s = self.end_s = time.monotonic()
        self._graph = graph
        self._interval_s = interval_s
        self._is_over = asyncio.Event()
        self._members: frozenset[str] = frozenset()
        self._members_since_s = self.start_s
        self._workers_seen_s: dict[str, float] = {}
        self._most_workers = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Sampler:
        self.start_s = time.monotonic()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, and raise the error that ended it before."""
        self.end_s = time.monotonic()
        assert self._task is not None
        # Not cancelled: a Redis client whose end is cancelled leaves its connection open.
        self._is_over.set()
        await self._task

    async def _run(self) -> None:
        while not self._is_over.is_set():
            due_s = time.monotonic() + self._interval_s
            await self.take()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                    await self._is_over.wait()

    async def take(self) -> None:
        """Take a sample of each process now."""
        self._note_workers()
        members = [member for member in self._graph.members if member.is_ready and member.is_running]
        await asyncio.gather(*(self._sample(member) for member in members), self._sample_redis())

    async def _sample(self, member: Member) -> None:
        with suppress(OSError):  # it has ended meanwhile
            figures: dict[str, float] = dict(process_figures(member.process.pid))
            if member.kind == "frontend":
                figures |= _sums(_BEHIND_RELAY, member.children())
            else:
                with suppress(OSError, TimeoutError, ValueError):
                    async with asyncio.timeout(_ANSWER_S):
                        view = await member.ask(op="debug")
                        figures |= _inner(view) | _sums("engine ", view.get("engine processes", ()))
            self._add(member.name, figures)

    async def _sample_redis(self) -> None:
        redis = self._graph.redis
        if redis.pid is None:
            return
        with suppress(OSError, TimeoutError, RedisError):
            async with Redis.from_url(redis.tcp_url) as client, asyncio.timeout(_ANSWER_S):
                info = await client.info()
                kinds = Counter([_kind_of_key(key) async for key in client.scan_iter("ampd:*", count=1000)])
                figures = {f"keys {kind}": float(number) for kind, number in kinds.items()}
                figures |= {"used bytes": info["used_memory"], "connections": info["connected_clients"]}
                held = info.get("db0", {"keys": 0, "expires": 0})
                figures["keys without a lifetime"] = held["keys"] - held["expires"]
                self._add(REDIS, figures)

    def is_settled(self) -> bool:
        """Whether as many processes serve as at the start, and have done so for `SETTLED_S`, as far as was looked."""
        members, now_s = self._graph.usual_members, time.monotonic()
        if members != self._members:
            self._members, self._members_since_s = members, now_s
        return bool(members) and now_s >= self._members_since_s + SETTLED_S

    def _note_workers(self) -> None:
        """Count the workers that ran within `FORGET_S`. They may have ended up to a sample after they were seen."""
        now_s = time.monotonic()
        self._workers_seen_s.update((member.name, now_s) for member in self._graph.workers if member.is_running)
        from_s = now_s - FORGET_S - self._interval_s
        self._most_workers = max(self._most_workers, sum(seen_s >= from_s for seen_s in self._workers_seen_s.values()))

    def _add(self, process: str, figures: dict[str, float]) -> None:
        at_s = time.monotonic()
        if (peers := figures.get(NIXL_PEERS)) is not None:
            figures[NIXL_PEERS_BEYOND] = max(0.0, peers - (self._most_workers - 1))
        unsettled = "" if self.is_settled() else UNSETTLED
        for figure, value in figures.items():
            self.series[process, figure + unsettled * (figure in _PER_WORKER)].append((at_s, value))
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"at_s": at_s - self.start_s, "process": process, **figures}) + "\n")


def process_figures(pid: int) -> dict[str, float]:
    """Figures of a process from `/proc`.

    Raises:
        OSError: it has ended.
    """
    folder = Path(f"/proc/{pid}")
    memory = {}
    for line in (folder / "smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("Rss", "Pss", "Private_Dirty"):
            memory[name] = int(rest.split()[0]) * _KIB
    links = []
    for entry in os.scandir(folder / "fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(entry.path))  # noqa: PTH115
    return {
        "RSS bytes": memory["Rss"],
        "PSS bytes": memory["Pss"],
        "descriptors": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "threads": len(os.listdir(folder / "task")),  # noqa: PTH208
    }


def _sums(prefix: str, pids: Collection[int]) -> dict[str, float]:
    """The sums over processes; if one has ended meanwhile, as of an engine that starts again, there are none."""
    sums: Counter[str] = Counter()
    with suppress(OSError):
        for pid in pids:
            sums.update(process_figures(pid))
        return {f"{prefix}{figure}": value for figure, value in sums.items() if figure not in NOT_JUDGED}
    return {}


def _inner(view: dict[str, Any]) -> dict[str, float]:
    figures = {name: float(value) for name, value in view.items() if name not in _NOT_NUMBERS}
    return {"asyncio tasks": float(sum(view["tasks"].values())), **figures}


def _kind_of_key(key: bytes) -> str:
    """`session` of `ampd:{namespace}:session:ID`. The keys of the harness begin in other ways."""
    return key.decode(errors="replace").split(":")[2]
