"""Changes in the processes of an engine under test: SGLang starts them, so a patch in the test does not reach them."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness.fake_streams import FakeDevice


@contextmanager
def in_engine_processes(hook: Callable[..., None], *args: Any) -> Iterator[None]:
    """Call `hook` first in each process that SGLang starts meanwhile.

    It goes inside `tests.harness.forked_engines.forked_engines`.
    """
    start = multiprocessing.Process._Popen

    def start_with_hook(process: BaseProcess) -> Any:
        started: Any = process
        started._target, started._args = _hooked, (hook, args, started._target, *started._args)
        return start(process)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.Process, "_Popen", staticmethod(start_with_hook))
        yield


def _hooked(hook: Callable[..., None], hook_args: tuple[Any, ...], target: Callable[..., Any], *args: Any) -> None:
    hook(*hook_args)
    target(*args)


class LateRank:
    """Which rank of each engine is late at the moment. A test chooses it while its engines run.

    Args:
        folder: of the test; a file in it tells the processes of the engines.
        longest_s: of one delay.
    """

    def __init__(self, folder: Path, longest_s: float) -> None:
        self._path = str(folder / "late-rank")
        self._longest_s = longest_s
        self.choose(0)

    def choose(self, rank: int) -> None:
        """From here on this rank is late, in the engines that have it."""
        new = Path(f"{self._path}.new")
        new.write_text(str(rank))
        new.replace(self._path)

    @contextmanager
    def in_engines(self) -> Iterator[None]:
        """Engines that start meanwhile have a late rank."""
        with in_engine_processes(delay_rank, self._path, self._longest_s):
            yield


def delay_rank(late: str, longest_s: float) -> None:
    """Let the rank that a file names do what ranks do each by itself later than the others, by random times.

    It gets each message, offers, writes and looks up pages, begins and ends loads, and forgets everything later.
    """
    from workers.kv.ranks.copies import PageLoader
    from workers.kv.ranks.link import RankLink
    from workers.kv.shared import KvGeometry

    rng = random.Random(1)

    def pause(link: RankLink) -> None:
        if str(link._rank) == Path(late).read_text():
            time.sleep(rng.uniform(0, longest_s))

    class SlowWriter:
        def __init__(self, link: RankLink, writer: Any) -> None:
            self._link, self._writer = link, writer

        def write(self, *args: Any) -> None:
            pause(self._link)
            self._writer.write(*args)

    make = RankLink.__init__

    def make_slow(link: RankLink, address: str, number: int, geometry: KvGeometry, writer: Any, *more: Any) -> None:
        make(link, address, number, geometry, SlowWriter(link, writer), *more)

    def pause_loader(loader: PageLoader) -> None:
        pause(loader._link)

    patches: Any = RankLink, PageLoader
    patches[0].__init__ = make_slow
    for name in ("start", "_release"):
        setattr(PageLoader, name, _after(pause_loader, getattr(PageLoader, name)))
    for name in ("_answer", "offer", "loadable", "begin_load", "end_load", "reset"):
        setattr(RankLink, name, _after(pause, getattr(RankLink, name)))


def _after(pause: Callable[..., None], act: Callable[..., Any]) -> Callable[..., Any]:
    def late(link: Any, *args: Any) -> Any:
        pause(link)
        return act(link, *args)

    return late


def delay_loads(longest_s: float) -> None:
    """Let each layer land when it is waited for, or later: a layer that does not wait for its own shows."""
    from workers.kv.ranks.copies import PageLoader

    rng = random.Random(1)
    load_on(FakeDevice())
    late: Any = PageLoader
    late._release = _after(lambda _loader: time.sleep(rng.uniform(0, longest_s)), late._release)


def load_on(device: FakeDevice) -> None:
    """Let the copies of this process have these streams. SGLang has those of the CPU."""
    from workers.kv.ranks import copies

    patched: Any = copies
    patched.torch = SimpleNamespace(**vars(torch) | {"get_device_module": lambda _where: device})
    patched.Pipeline.launch = lambda *args: device.launch(*args)


def change_memory(factor: float) -> None:
    """Let SGLang find this many times as much free memory each time it looks, because of other processes."""
    import psutil

    looks = count()
    measured = psutil.virtual_memory

    def changed() -> Any:
        memory = measured()
        return memory._replace(available=int(factor ** next(looks) * memory.available))

    psutil.virtual_memory = changed


TAKEN, OVERWRITTEN = "a load takes a page of the step", "the step overwrites a load"
"""What `write_late` notes."""


class _Step:
    """The KV that the forward which was launched last still writes, as on a GPU.

    Args:
        notes: a file that gets a line, `TAKEN` or `OVERWRITTEN`, when a load starts and when the forward writes.
    """

    def __init__(self, notes: str) -> None:
        self.result: Any = None
        self.stream: Any = None
        self._notes = notes
        self._slots: set[int] = set()
        self._writes: list[tuple[Any, Any, Any]] = []

    def launched(self, stream: Any, pool: Any, slots: Any, result: Any) -> None:
        """Remember what the forward has written."""
        self.stream, self.result = stream, result
        self._slots = set(slots.tolist())
        self._writes = [(buffer, slots, buffer[slots].clone()) for buffer in (*pool.k_buffer, *pool.v_buffer)]

    def end(self) -> None:
        """Let the forward write at last."""
        if any(not buffer[slots].equal(values) for buffer, slots, values in self._writes):
            self._note(OVERWRITTEN)
        for buffer, slots, values in self._writes:
            buffer[slots] = values
        self._slots, self._writes = set(), []

    def loads(self, pages: set[int], page_tokens: int) -> None:
        """Note whether these pages, which a load will fill, are pages that the forward writes."""
        if pages & {slot // page_tokens for slot in self._slots}:
            self._note(TAKEN)

    def _note(self, line: str) -> None:
        with Path(self._notes).open("a") as file:
            file.write(f"{line}\n")


def write_late(notes: str, page_tokens: int) -> None:
    """Let SGLang's overlap schedule behave on a CPU as on a GPU where a forward is as slow as its events allow.

    On a CPU a forward has ended when it is launched. So what it wrote is written again, at the latest possible moment:
    when the loader waits for it, before its result is processed, or before the next forward. The scheduler's stream
    waits for no forward. A load runs as early as it can. See `_Step` for the notes.
    """
    from sglang.srt.managers.scheduler import Scheduler

    from workers.kv.ranks.copies import PageLoader

    step, device = _Step(notes), FakeDevice()
    events: Any = device.Event

    class Event(events):  # type: ignore[misc]
        is_of_step = False

        def record(self, stream: Any = None) -> None:
            self.is_of_step = stream is not None and stream is step.stream
            super().record(stream)

        def reach(self) -> None:
            if self.is_of_step:
                step.end()
            super().reach()

    device.Event = Event
    load_on(device)
    loader: Any = PageLoader
    start = loader.start
    run, process = Scheduler.run_batch, Scheduler.process_batch_result

    def start_and_load(self: Any) -> Any:
        step.loads({page for load, _ in self._queued.values() for page in load["kv"][0].tolist()}, page_tokens)
        index = start(self)
        self._copies.loading.event(self._copies.loading.emptying).reach()
        return index

    def run_late(self: Any, batch: Any, *args: Any, **more: Any) -> Any:
        step.end()
        slots = batch.out_cache_loc.clone()
        result = run(self, batch, *args, **more)
        step.launched(self.forward_stream, self.token_to_kv_pool_allocator.get_kvcache(), slots, result)
        return result

    def process_after(self: Any, batch: Any, result: Any, *args: Any, **more: Any) -> Any:
        if result is step.result:
            step.end()
        return process(self, batch, result, *args, **more)

    loader.start = start_and_load
    Scheduler.run_batch, Scheduler.process_batch_result = run_late, process_after
