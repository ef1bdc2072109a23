"""Rounds that ended go to the shared state."""

import asyncio
from typing import Any

from ampd.types import Slo
from router.decision_record import Decided, DecisionRecord, RoundFacts
from router.load_recorder import LoadRecorder
from router.served import ServedRound
from tests.memory_store import MemoryState, MemoryStore
from tests.virtual_time import virtually

SLO = Slo(1.0, 0.1)


def served(**facts: Any) -> ServedRound:
    record = DecisionRecord(
        RoundFacts("client's name", "ampd", "key"), Decided(hist_tokens=64, incr_tokens=36), kept_tokens=80
    )
    record.measures.hit_tokens = {"device": 48, "recomputed": 32}
    usual = {"is_initial": False, "is_complete": True, "was_left": False, "lasted_s": 2.0, "output_tokens": 7}
    return ServedRound(record, SLO, **{**usual, "ttft_s": 0.5, "itl_s": 0.05, **facts})


@virtually
async def test_complete_rounds_are_written_each_second() -> None:
    clock = asyncio.get_running_loop().time
    state = MemoryState(clock)
    store = MemoryStore(state, clock)
    recorder = LoadRecorder(store, 60.0, clock)
    recorder.start()
    recorder(served())
    recorder(served(ttft_s=1.5))
    recorder(served(is_complete=False, was_left=True))
    await asyncio.sleep(1.5)
    await recorder.stop()
    rounds = await store.recent_load()
    assert [(name, item.kept_tokens, item.prompt_tokens, item.output_tokens) for name, item in rounds] == [
        ("key", 80, 100, 7)
    ] * 2
    assert [item.is_met for _, item in rounds] == [True, False]
    assert all(item.ended_s is not None and abs(item.ended_s - item.sent_s - 2.0) < 1e-3 for _, item in rounds)


@virtually
async def test_a_lost_state_loses_records_and_nothing_else() -> None:
    state = MemoryState()
    store = MemoryStore(state)
    recorder = LoadRecorder(store, 60.0)
    recorder(served())
    state.lose()
    await recorder.write()
    state.restore()
    recorder(served())
    await recorder.write()
    assert len(await store.recent_load()) == 1


@virtually
async def test_a_burst_is_bounded() -> None:
    store = MemoryStore(MemoryState())
    recorder = LoadRecorder(store, 60.0)
    for _ in range(2000):
        recorder(served())
    await recorder.write()
    assert len(await store.recent_load()) == 500


def test_a_round_in_progress_is_known_until_it_ends_however_it_ends() -> None:
    recorder = LoadRecorder(MemoryStore(MemoryState()), 60.0)
    first, lost = served(), served(is_complete=False)
    recorder.placed(first.record, 3.0)
    recorder.placed(first.record, 3.0)  # again, after its worker was lost
    recorder.placed(lost.record, 4.0)
    assert [(name, item.sent_s, item.kept_tokens, item.prompt_tokens) for name, item in recorder.running()] == [
        ("key", 3.0, 80, 100),
        ("key", 4.0, 80, 100),
    ]
    assert all(item.ended_s is None for _, item in recorder.running())
    recorder(first)
    recorder(lost)
    assert not recorder.running()
