"""SGLang under the harness: its graph and its faults.

Nothing runs beside the victim of a cell, because the answers of other sessions would have to be learnt, too.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ampd.keys import PAGE_TOKENS
from ampd.tiny_model import TinyModel, tiny_model_path
from benchmarks.faults import inside
from benchmarks.faults.aims import DEATH_AIM_S, STOPPED_S, WOKEN_AIM_S, hung_engine_aim_s
from benchmarks.faults.cell import CellRunner
from benchmarks.faults.cluster import WORKER_KINDS, GraphKind, LiveGraph, Member
from benchmarks.faults.fault import Action, Fault, Scene
from benchmarks.faults.foreign_workers import FOREIGN_FAULTS, forgive_foreign_texts
from benchmarks.faults.kv_faults import NO_READ_AT, armed
from benchmarks.faults.learnt import LEARNT, LearntTexts
from benchmarks.faults.load import Agent, Client
from benchmarks.faults.moments import (
    BLOCKERS_EACH,
    BLOCKING_TOKENS,
    FIRST_OUTPUT_TOKENS,
    HISTORY_TOKENS,
    INCREMENT_TOKENS,
    LAST_INCREMENT_TOKENS,
    LOCAL,
    OUTPUT_TOKENS,
    Moment,
    Stage,
    blocker_name,
)
from benchmarks.faults.process_faults import PROCESS_FAULTS, stopped
from benchmarks.faults.request_faults import REQUEST_FAULTS
from benchmarks.faults.sglang_worker import HANGS, RAISES, WATCHDOG_S, engine_fault_file
from tests.harness.graph import PRELOADED
from tests.waiting import until

_GROUP = "SGLang"
_MODEL = TinyModel(layers=6, hidden_size=512, heads=8, kv_heads=4)
"""Its prefills and decode steps take long enough to be struck on a CPU."""

MOMENTS = (Moment.WAITING, Moment.PREFILLING, Moment.DECODING, Moment.TOOL_GAP)
"""Reads of KV take milliseconds here, which is too short for a fault to strike at."""

_SIZES = {"prefill": 1, "decode": 2, "coordinator": 2, "frontend": 2}
_VICTIM_STALL_S = 0.25

_DETOKENIZER_GIVEN_UP_S = 30.0
"""A scheduler goes on until its requests end, and an engine that computes does not stand still."""


def sglang_graph(prefill: int = _SIZES["prefill"], store_gib: str = "0.25") -> GraphKind:
    """Two decode workers and, by default, one prefill worker, on the CPU in fp32."""
    flags = ("--device", "cpu", "--dtype", "float32", "--max-total-tokens", "16384", "--max-context-tokens", "8192")
    return GraphKind(
        engine="sglang",
        worker_flags=(*flags, "--kv-store-gib", store_gib),
        sizes={**_SIZES, "prefill": prefill},
        preloaded=(*PRELOADED, "benchmarks.faults.sglang_server"),
        environment={"OMP_NUM_THREADS": "1"},
        model=tiny_model_path(_MODEL),
    )


class SglangRunner(CellRunner):
    """Learns the right answers before each cell."""

    def __init__(self, graph: LiveGraph) -> None:
        self._learnt = LearntTexts()
        super().__init__(graph, self._learnt, agents=0, victim_stall_s=_VICTIM_STALL_S)

    async def prepare(self, client: Client, name: str) -> None:
        """Run what the victim and the blockers of this run will send.

        Raises:
            RuntimeError: a round did not complete.
        """
        victim = Agent(client, self._learnt, f"{name}-victim{LEARNT}", Stage.rng(name))
        await self._learn(victim, HISTORY_TOKENS, FIRST_OUTPUT_TOKENS, options=LOCAL)
        await self._learn(victim, INCREMENT_TOKENS, OUTPUT_TOKENS)
        await self._learn(victim, LAST_INCREMENT_TOKENS, FIRST_OUTPUT_TOKENS)
        await self._learn(victim, PAGE_TOKENS, 1, is_final=True)
        for number in range(BLOCKERS_EACH * len(self._graph.of("prefill"))):
            blocker = blocker_name(name, number)
            agent = Agent(client, self._learnt, f"{blocker}{LEARNT}", Stage.rng(blocker))
            await self._learn(agent, PAGE_TOKENS, 1, options=LOCAL)
            await self._learn(agent, BLOCKING_TOKENS, 1, is_final=True)

    async def _learn(self, agent: Agent, *tokens: int, **options: Any) -> None:
        result = await self._learnt.learn(agent, *tokens, **options)
        if result.finish_reason != "length":
            raise RuntimeError(f"{agent.session_id}: {result.ending}: {result.detail}")


_SCHEDULER, _DETOKENIZER = 0, -1
"""Places in the order in which SGLang starts its processes."""


def _signals(kind: str, number: signal.Signals) -> Action:
    """Signal a worker and its engine at once, as the end of a container does."""

    async def act(scene: Scene) -> None:
        if number != signal.SIGCONT:  # a process that is stopped does not answer
            member = scene.to_end(kind) if number == signal.SIGKILL else scene.processes[kind]
            scene.kept["processes"] = [member.process.pid, *await _engine_processes(member)]
        for pid in scene.kept["processes"]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    return act


async def _engine_processes(member: Member) -> list[int]:
    view = await member.ask(op="debug")
    return list(view["engine processes"])


def _signals_engine(number: signal.Signals, part: int = _SCHEDULER) -> Action:
    """Signal one of SGLang's processes."""

    async def act(scene: Scene) -> None:
        if number != signal.SIGCONT:
            scene.kept["engine"] = sorted(await _engine_processes(scene.worker))[part]
        with suppress(ProcessLookupError):
            os.kill(scene.kept["engine"], number)

    return act


async def _stop_detokenizer(scene: Scene) -> None:
    scene.kept["worker"] = scene.worker
    await _signals_engine(signal.SIGSTOP, _DETOKENIZER)(scene)


async def _waits_or_is_given_up(scene: Scene) -> bool:
    """Whether the victim's round waits for the process that stands still, or its worker has ended that process."""
    return await _is_given_up(scene) or not scene.stage.is_over


async def _is_given_up(scene: Scene) -> bool:
    if not scene.kept["worker"].is_running:
        return True
    return scene.kept["engine"] not in await _engine_processes(scene.kept["worker"])


async def _until_detokenizer_is_given_up(scene: Scene) -> None:
    """A round that waits for it would wait for ever."""
    if "engine" not in scene.kept:
        return
    try:
        await until(lambda: _is_given_up(scene), _DETOKENIZER_GIVEN_UP_S, poll_s=0.1)
    except TimeoutError:
        scene.complaints.append(
            f"a detokenizer that stands still was not given up within {_DETOKENIZER_GIVEN_UP_S:g} s"
        )
    await _signals_engine(signal.SIGCONT, _DETOKENIZER)(scene)


def _injects(fault: str) -> Action:
    async def act(scene: Scene) -> None:
        engine_fault_file(scene.worker.control).write_text(fault)

    return act


async def _is_taken(scene: Scene) -> bool:
    """The scheduler takes its fault with its next batch."""
    return not engine_fault_file(scene.worker.control).exists()


async def _withdraw(scene: Scene) -> None:
    """It may not have struck, because the engine had nothing to do."""
    engine_fault_file(scene.worker.control).unlink(missing_ok=True)


def _with_known_texts(fault: Fault) -> Fault:
    """A rolling fault. Rounds of workers with new weights are not compared, because their tokens are not known."""

    async def check(scene: Scene) -> None:
        models = scene.kept.get("weights", {}).items()
        new = [worker for worker, model in models if model == scene.graph.worker_model != scene.kept["model"]]
        forgive_foreign_texts(scene.client.results, new)
        await fault.check(scene)

    async def prepare(scene: Scene) -> None:
        scene.kept["model"] = scene.graph.worker_model
        await fault.prepare(scene)

    return replace(fault, group=_GROUP, prepare=prepare, check=check)


SGLANG_FAULTS = [
    *(
        Fault(
            f"kill-{kind}",
            _GROUP,
            f"SIGKILL of the {kind} worker with its engine",
            _signals(kind, signal.SIGKILL),
            aim_s=DEATH_AIM_S,
        )
        for kind in WORKER_KINDS
    ),
    *(stopped(kind, f"the {kind} worker with its engine", _GROUP, partial(_signals, kind)) for kind in WORKER_KINDS),
    Fault(
        "kill-engine",
        _GROUP,
        "SIGKILL of SGLang's scheduler",
        _signals_engine(signal.SIGKILL),
        aim_s=DEATH_AIM_S,
    ),
    Fault(
        "kill-detokenizer",
        _GROUP,
        "SIGKILL of SGLang's detokenizer",
        _signals_engine(signal.SIGKILL, _DETOKENIZER),
        aim_s=DEATH_AIM_S,
    ),
    Fault(
        "stop-detokenizer",
        _GROUP,
        f"SIGSTOP of SGLang's detokenizer (given up after {WATCHDOG_S:g} s here, 60 s in real workers)",
        _stop_detokenizer,
        _until_detokenizer_is_given_up,
        has_struck=_waits_or_is_given_up,
        holds_s=WATCHDOG_S,
        aim_s=hung_engine_aim_s(WATCHDOG_S),
    ),
    Fault(
        "stop-engine",
        _GROUP,
        f"SIGSTOP of SGLang's scheduler, SIGCONT after {STOPPED_S:g} s",
        _signals_engine(signal.SIGSTOP),
        _signals_engine(signal.SIGCONT),
        holds_s=STOPPED_S,
        aim_s=WOKEN_AIM_S,
    ),
    Fault(
        "engine-raises",
        _GROUP,
        "an exception in SGLang's scheduler",
        _injects(RAISES),
        _withdraw,
        has_struck=_is_taken,
        aim_s=DEATH_AIM_S,
    ),
    Fault(
        "engine-hangs",
        _GROUP,
        f"SGLang's scheduler hangs (given up after {WATCHDOG_S:g} s here, 60 s in real workers)",
        _injects(HANGS),
        _withdraw,
        has_struck=_is_taken,
        holds_s=WATCHDOG_S + 2.0,
        aim_s=hung_engine_aim_s(WATCHDOG_S),
    ),
    armed(
        "kv-refused",
        _GROUP,
        "workers refuse reads of their KV",
        inside.KV_FAILS,
        never_at=NO_READ_AT,
    ),
    armed(
        "kv-breaks",
        _GROUP,
        "reads of KV break off half way",
        inside.KV_COPY_FAILS,
        never_at=NO_READ_AT,
        holds_s=3.0,
    ),
    *(_with_known_texts(fault) for fault in PROCESS_FAULTS if fault.name.startswith("rolling-")),
    *FOREIGN_FAULTS,
    *(fault for fault in REQUEST_FAULTS if fault.name in ("poison", "deadly-request")),
]
