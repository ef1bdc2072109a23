"""One of SGLang's processes is killed or stopped under a request, and SGLang starts again."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ampd.keys import page_keys
from ampd.perf.presets import load_performance_model
from ampd.tiny_model import TinyModel, make_tiny_model
from ampd.wire import KvRequest
from workers.engines import supervised
from workers.engines.base import EngineError, EngineLostError
from workers.engines.supervised import SupervisedEngine

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

import workers.engines.sglang
from tests.harness.sglang_pair import run, text
from tests.waiting import PATIENCE_S
from workers.engines.sglang import SglangEngine, SglangSettings
from workers.engines.sglang_processes import SglangProcesses
from workers.engines.sglang_settings import Device

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = TinyModel(layers=2, hidden_size=128, heads=2, kv_heads=1, max_context_tokens=2048)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", sizes)


@asynccontextmanager
async def supervision(model: Path, tp: int = 1) -> AsyncIterator[tuple[Any, asyncio.Task[str]]]:
    inner = SglangEngine(SglangSettings(model=model, dtype="float32", device=Device.CPU, max_total_tokens=8000, tp=tp))
    engine = SupervisedEngine(inner, load_performance_model("tiny-cpu"))
    await engine.start()
    lost = asyncio.create_task(engine.wait_lost())
    try:
        yield engine, lost
    finally:
        lost.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await engine.stop()


def process_of(engine: Any, place: int = 0) -> int:
    """SGLang starts its schedulers first, in the order of their ranks."""
    return sorted(process.pid for process in engine._engine._sglang.children)[place]


DETOKENIZER = -1
"""Its place in the same order. It starts last."""


def name_of(engine: Any, pid: int) -> str:
    """As SGLang's own watchdog calls one of its processes."""
    watchdog = engine._engine._sglang.manager._subprocess_watchdog
    return dict(zip((process.pid for process in watchdog._processes), watchdog._names, strict=True))[pid]


class LateProcess:
    """A process that does not end at once when it is killed, but after a turn of the event loop."""

    sentinel = -1

    def __init__(self) -> None:
        self._ended = threading.Event()

    def terminate(self) -> None: ...

    def close(self) -> None: ...

    def kill(self) -> None:
        asyncio.get_running_loop().call_soon(self._ended.set)

    def join(self, timeout_s: float = 20.0) -> None:
        assert self._ended.wait(timeout_s) or timeout_s == 0.0, "the event loop stood still"


async def test_the_event_loop_goes_on_while_killed_processes_end() -> None:
    processes: Any = SglangProcesses()
    processes.children = [LateProcess(), LateProcess()]
    await processes.end_children(grace_s=0.0)
    assert processes.children == []


async def test_a_request_of_a_test_fails_with_the_process_of_its_engine() -> None:
    """SGLang itself would wait until the time of the test is over."""
    lost = asyncio.get_running_loop().create_future()

    async def never(_request: Any) -> AsyncIterator[Any]:
        lost.set_result("SGLang's process scheduler ended by itself")
        await asyncio.get_running_loop().create_future()
        yield

    engine: Any = SimpleNamespace(generate=never, _sglang=SimpleNamespace(lost=lost))
    with pytest.raises(AssertionError, match="scheduler ended by itself; it has written the reason"):
        await run(engine, "s", [1], 1)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_an_engine_that_is_gone_while_it_warms_up_does_not_start(
    model: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = SglangEngine(SglangSettings(model=model, dtype="float32", device=Device.CPU, max_total_tokens=8000))
    read_info = engine._read_info

    def gone(sglang: SglangProcesses) -> Any:
        os.kill(process_of(SimpleNamespace(_engine=engine)), number)
        return read_info(sglang)

    monkeypatch.setattr(engine, "_read_info", gone)
    if number == signal.SIGSTOP:
        monkeypatch.setattr(workers.engines.sglang, "WARM_UP_S", 1.0)
    says = "ended by itself" if number == signal.SIGKILL else "hangs"
    with pytest.raises(EngineError, match=says):
        async with asyncio.timeout(PATIENCE_S):
            await engine.start()
    assert engine._sglang.children == []


PROMPT_TOKENS, PAGE = 120, 16
NEVER_S = 1e6
TURNS = 100
"""Of the event loop, between the end of a process and that the engine counts as lost. The tasks take some each."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "tp", "place"),
    [(signal.SIGKILL, 1, 0), (signal.SIGKILL, 2, 1), (signal.SIGSTOP, 1, 0), (signal.SIGKILL, 1, DETOKENIZER)],
    ids=["killed", "its last rank killed", "stopped", "its detokenizer killed"],
)
async def test_a_process_that_is_gone_fails_its_requests_and_starts_again_over_the_same_store(
    model: Path,
    forked: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    tp: int,
    place: int,
) -> None:
    was_killed = number == signal.SIGKILL
    if was_killed:
        monkeypatch.setattr(supervised, "CHECK_INTERVAL_S", NEVER_S)  # only the end itself can be noticed
    async with supervision(model, tp) as (engine, lost):
        prompt = text(1, PROMPT_TOKENS)
        before = await run(engine, "first", prompt, 8)
        call = asyncio.create_task(run(engine, "second", text(2, PROMPT_TOKENS), 1500))
        while not engine.load().running_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        victim = process_of(engine, place)
        assert ("detokenizer" in name_of(engine, victim)) == (place == DETOKENIZER)
        with monkeypatch.context() as impatient:
            impatient.setattr(supervised, "STALL_FLOOR_S", NEVER_S if was_killed else 3.0)
            since_s = time.monotonic()
            if was_killed:
                await killed(engine, victim)
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                assert engine._lost is not None, "no time but the event loop's own may pass"
            else:
                os.kill(victim, number)
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(EngineLostError) as failure:
                    await call
        print(f"noticed after {time.monotonic() - since_s:.2f} s: {failure.value}")
        assert failure.value.status == 502
        assert ("ended by itself" in str(failure.value)) == was_killed
        assert ("the engine hangs" in str(failure.value)) == (not was_killed)
        await serves_again(engine, starts=1)
        print(f"serves again after {time.monotonic() - since_s:.2f} s")
        assert not os.path.exists(f"/proc/{victim}")  # noqa: ASYNC240, PTH110
        after = await run(engine, "first", prompt, 8)
        assert after.token_ids == before.token_ids
        assert after.cached_tokens == PROMPT_TOKENS // PAGE * PAGE, "the store lives on"
        if not was_killed:
            # SGLang's own watchdog of a process that hangs does this.
            os.kill(os.getpid(), signal.SIGQUIT)
            async with asyncio.timeout(PATIENCE_S):
                while engine._lost is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert "SGLang reports" in engine._lost
            await serves_again(engine, starts=2)
            assert (await run(engine, "first", prompt, 8)).token_ids == before.token_ids
        assert not lost.done()


@pytest.mark.long
async def test_a_detokenizer_that_stands_still_is_noticed_while_prefills_go_on(
    model: Path,
    forked: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests go on coming, and the scheduler stores the KV of each of them."""
    async with supervision(model) as (engine, lost):
        victim = process_of(engine, DETOKENIZER)
        assert "detokenizer" in name_of(engine, victim)
        monkeypatch.setattr(supervised, "STALL_FLOOR_S", 3.0)
        monkeypatch.setattr(engine, "_may_restart", lambda: False)  # the start of the next one is tested above
        os.kill(victim, signal.SIGSTOP)
        stored_before, calls = engine.kv.store._offers.decided, list[asyncio.Task[Any]]()
        async with asyncio.timeout(PATIENCE_S):
            while not lost.done():
                number = len(calls) + 1
                calls.append(asyncio.create_task(run(engine, f"session-{number}", text(number, PROMPT_TOKENS), 8)))
                await asyncio.wait({lost}, timeout=0.25)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert "the engine hangs" in await lost
        assert {type(end) for end in ends} == {EngineLostError}
        stored = engine.kv.store._offers.decided - stored_before
        print(f"{len(calls)} requests while the detokenizer stood still, {stored} offers of KV")
        assert stored > 1, "prefills went on"


@pytest.mark.long
async def test_peers_read_the_store_while_the_engine_starts_again(
    model: Path,
    forked: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with supervision(model) as (engine, lost):
        prompt, loop = text(1, PROMPT_TOKENS), asyncio.get_running_loop()
        await run(engine, "first", prompt, 8)
        lease: KvRequest = {"op": "lease", "keys": page_keys(prompt, PAGE, tenant=""), "ttl_s": 5.0}
        matched: list[int] = []
        launch = SglangProcesses._launch

        def asked_meanwhile(self: SglangProcesses, arguments: Any) -> None:
            for start in (lambda: None, lambda: launch(self, arguments)):
                start()
                # Were this the thread of the event loop, the answer could not come.
                answer = asyncio.run_coroutine_threadsafe(engine.kv.serve(lease), loop).result(30)
                matched.append(answer["matched"])

        monkeypatch.setattr(SglangProcesses, "_launch", asked_meanwhile)
        os.kill(process_of(engine), signal.SIGKILL)
        await serves_again(engine, starts=1)
        assert matched == [PROMPT_TOKENS // PAGE] * 2
        assert not lost.done()


async def killed(engine: Any, pid: int) -> None:
    """Kill a process. Returns in the turn of the event loop in which its end arrives.

    It arrives from the fork server, which needs a core for that.
    """
    (process,) = (process for process in engine._engine._sglang.children if process.pid == pid)
    ended, loop, descriptor = asyncio.Event(), asyncio.get_running_loop(), os.dup(process.sentinel)
    loop.add_reader(descriptor, ended.set)
    try:
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def serves_again(engine: Any, starts: int) -> None:
    """Return when the engine was started this often again."""
    async with asyncio.timeout(300):
        while engine._starts < starts or engine._lost is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
