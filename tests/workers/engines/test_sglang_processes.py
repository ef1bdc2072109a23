"""The end of an engine holds up nothing else in its worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from workers.engines import sglang_processes
from workers.engines.sglang_processes import close_manager

zmq = pytest.importorskip("zmq")


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_the_event_loop_goes_on_while_the_watchdog_waits_for_its_thread(released: threading.Event) -> None:
    stopping = threading.Event()

    def stop() -> None:
        stopping.set()
        released.wait()

    manager = SimpleNamespace(_subprocess_watchdog=SimpleNamespace(stop=stop), asyncio_tasks=set())
    closing = asyncio.create_task(close_manager(SimpleNamespace(), manager))
    await asyncio.to_thread(stopping.wait)
    assert not closing.done()
    released.set()
    await closing


async def test_sockets_that_do_not_close_hold_up_neither_the_event_loop_nor_the_next_engine(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_processes, "CLOSE_S", 0.05)

    class Stuck(zmq.Context):  # type: ignore[misc, name-defined]
        def destroy(self, linger: int | None = None) -> None:
            released.wait()
            super().destroy(linger)

    socket = Stuck().socket(zmq.PUSH)
    engine = SimpleNamespace(send_to_rpc=socket)
    await close_manager(engine, SimpleNamespace(asyncio_tasks=set()))
    assert socket.closed
    assert engine.send_to_rpc is None
