"""A fault that hits nothing is no pass: its run is repeated, and fails in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.faults import cell, inside, strike
from benchmarks.faults.__main__ import run
from benchmarks.faults.cluster import MODELLED, LiveGraph, Member
from benchmarks.faults.fault import Fault, Scene
from benchmarks.faults.faults import NONE
from benchmarks.faults.inside import Armed
from benchmarks.faults.kv_faults import KV_FAULTS, arms_workers, disarm, struck
from benchmarks.faults.matrix import tables
from benchmarks.faults.moments import MissedMomentError, Moment
from benchmarks.faults.setting import Setting

FAULT = Fault(
    "kv-refused",
    "Group",
    "what",
    arms_workers(inside.KV_FAILS),
    disarm,
    has_struck=struck(inside.KV_FAILS),
    holds_s=0.0,
)


class InstantStage:
    """The victim is at once where it should be."""

    async def begin(self, _moment: Moment) -> None: ...

    async def reach(self, _moment: Moment) -> None: ...

    def processes(self) -> dict[str, Any]:
        return {"decode": None}

    def resume(self) -> None: ...

    def check(self, _moment: Moment, _struck_s: float) -> None: ...


class Worker:
    """A worker's part of the harness, with reads of KV between a fault and its end.

    Attributes:
        reads: their number.
    """

    name, kind = "decode-0", "decode"

    def __init__(self, reads: int) -> None:
        self.reads = reads
        self.armed = Armed()

    @property
    def is_running(self) -> bool:
        return True

    async def ask(self, op: str, fault: str = "") -> dict[str, Any]:
        if op == "arm":
            self.armed.arm(fault)
            for _ in range(self.reads):
                self.armed.strikes(inside.KV_FAILS)
        elif op == "disarm":
            self.armed.disarm()
        return {"struck": dict(self.armed.struck)}


class Graph(LiveGraph):
    async def replace_ended(self) -> None: ...


def scene(tmp_path: Path, worker: Worker) -> Scene:
    unused = cast("Any", None)
    graph = Graph(tmp_path, unused, unused, unused)
    graph.members.append(cast("Member", worker))
    return Scene(graph, unused, cast("Any", InstantStage()), Moment.TOOL_GAP)


async def test_a_fault_that_hits_nothing_has_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strike, "STRIKES_WITHIN_S", 0.0)
    worker = Worker(reads=0)
    missed = (await strike.strike(FAULT, scene(tmp_path, worker))).missed
    assert isinstance(missed, MissedMomentError)
    assert str(missed) == "tool-gap: kv-refused hit nothing"
    assert not worker.armed.strikes(inside.KV_FAILS), "it is healed all the same"


async def test_a_fault_that_hits_a_read_has_struck_and_must_do_so_again_in_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(reads=1)
    assert (await strike.strike(FAULT, scene(tmp_path, worker))).missed is None
    monkeypatch.setattr(strike, "STRIKES_WITHIN_S", 0.0)
    worker.reads = 0
    assert (await strike.strike(FAULT, scene(tmp_path, worker))).missed is not None


async def test_a_run_that_misses_each_time_fails(tmp_path: Path) -> None:
    tries = 0

    class Missing(cell.CellRunner):
        async def _run(self, fault: Fault, moment: Moment) -> cell.CellResult:  # noqa: ARG002
            nonlocal tries
            tries += 1
            raise MissedMomentError("hit nothing")

    runner = Missing(Graph(tmp_path, *cast("Any", (None, None, None))), cast("Any", object()))
    with pytest.raises(MissedMomentError):
        await runner.run(FAULT, Moment.DECODING)
    assert tries == cell.TRIES


@pytest.mark.parametrize("fault", KV_FAULTS, ids=lambda fault: fault.name)
def test_each_fault_that_is_switched_on_inside_a_worker_says_whether_it_has_struck(fault: Fault) -> None:
    assert fault.has_struck is not NONE.has_struck


async def test_a_cell_in_which_a_fault_cannot_strike_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = Fault("kv-refused", "Group", "what", never_at=(Moment.DECODING,))
    moments = [Moment.DECODING, Moment.TOOL_GAP]
    cells: list[tuple[str, str]] = []

    class Runner:
        async def start(self) -> None: ...

        async def run(self, fault: Fault, moment: Moment) -> cell.CellResult:
            cells.append((fault.name, moment.value))
            return cell.CellResult(fault.name, moment.value, accepted=1, completed=1)

    class NoGraph:
        async def __aenter__(self) -> None: ...

        async def __aexit__(self, *_: object) -> None: ...

    monkeypatch.setattr("benchmarks.faults.__main__.live_graph", lambda *_: NoGraph())
    setting = Setting({never.name: never}, moments, MODELLED, cast("Any", lambda _: Runner()))
    results = await run(tmp_path, [never], moments, 1, setting=setting)
    assert cells == [("none", "decoding"), ("none", "tool-gap"), ("kv-refused", "tool-gap")]
    (row,) = (line for line in tables(results, {never.name: never}).splitlines() if line.startswith("| `kv-refused`"))
    assert "| - | 1/1, 0.0 s |" in row
