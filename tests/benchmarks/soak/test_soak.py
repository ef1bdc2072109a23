"""Half a minute of the soak: rounds end properly, nothing is left, and every process is measured."""

import json
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.cluster import KINDS
from benchmarks.faults.faults import FAULTS
from benchmarks.faults.load import Client, Ending, RoundResult
from benchmarks.faults.tokens import AnyText
from benchmarks.soak import soak as soak_module
from benchmarks.soak.__main__ import report
from benchmarks.soak.sampling import REDIS
from benchmarks.soak.soak import SoakResult, _Run, shuffled_again, soak
from benchmarks.soak.soaked import ENGINES, SOAKED, modelled
from tests.waiting import PATIENCE_S

SHORT = {name: FAULTS[name] for name in ("kill-prefill", "kill-decode", "redis-full", "kv-breaks", "client-leaves")}
EVERYWHERE = {"RSS bytes", "PSS bytes", "descriptors", "sockets", "threads"}
INSIDE = {"asyncio tasks", "rounds", "queued"}


def test_each_fault_comes_once_before_one_comes_again() -> None:
    faults = list(SOAKED.values())
    drawn = list(islice(shuffled_again(faults, random.Random(7)), 2 * len(faults)))
    first, second = drawn[: len(faults)], drawn[len(faults) :]
    assert {fault.name for fault in first} == {fault.name for fault in second} == set(SOAKED)
    assert "kill-coordinator" in SOAKED
    assert first != second


class WithOpenSession(Client):
    """A client with a session whose last round was never served. It is served now."""

    def __init__(self) -> None:
        super().__init__(list, AnyText(), 20.0)
        self.results = [RoundResult("s1", 0.0, ending=Ending.FAILED), RoundResult("s2", 0.0, ending=Ending.LEFT)]
        self.results.append(RoundResult("s2", 1.0, ending=Ending.COMPLETED, is_final=True))

    async def send(self, session_id: str, *_: Any, is_final: bool = False, **__: Any) -> RoundResult:
        self.results.append(RoundResult(session_id, 2.0, ending=Ending.COMPLETED, is_final=is_final))
        return self.results[-1]


async def test_a_session_whose_last_round_was_not_served_is_a_violation() -> None:
    run: Any = object.__new__(_Run)
    run.result, run._soaked, run._expected = SoakResult(1.0, 0), modelled(), AnyText()
    run._client = WithOpenSession()
    await run._end_open_sessions()
    assert run.result.ended_late == ["s1"]
    assert run.result.violations == ["s1: its last round was not served within 30 s"]
    assert run._client.open_sessions() == []
    await run._client.close()


def test_the_soak_of_real_engines_has_no_answers_that_cannot_be_learnt() -> None:
    names = ENGINES["sglang"]().setting.faults.keys()
    assert not {"other-weights", "other-dtype", "rolling-restart", "rolling-weights", "deadly-request"} & names
    assert {"stop-detokenizer", "kill-detokenizer", "poison"} <= names


@pytest.mark.slow
@pytest.mark.long
async def test_rounds_end_properly_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine is slow, and nothing is lost by that.
    monkeypatch.setattr(soak_module, "RELEASED_WITHIN_S", PATIENCE_S)
    samples = tmp_path / "samples.jsonl"
    usual = modelled()
    soaked = replace(usual, setting=replace(usual.setting, faults=SHORT), bound_s=PATIENCE_S)
    result = await soak(tmp_path, minutes=0.4, soaked=soaked, samples=samples, interval_s=1.0)
    assert result.violations == []
    assert (result.rounds["lost"], result.rounds["wrong"]) == (0, 0)
    assert result.rounds["completed"] > 0
    assert result.events.total() > 0
    figures: dict[str, set[str]] = {}
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        figures.setdefault(sample["process"].rpartition("-")[0] or REDIS, set()).update(sample)
    assert set(figures) == {*KINDS, REDIS}
    assert all(figures[kind] >= EVERYWHERE for kind in KINDS)
    assert all(figures[kind] >= INSIDE for kind in KINDS[:3])
    assert {"page leases", "protected requests", "store tokens"} <= figures["decode"]
    assert {"keys worker", "keys session", "used bytes", "connections"} <= figures[REDIS]
    assert "accepted" in report(result)
