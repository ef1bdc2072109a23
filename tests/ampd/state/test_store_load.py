"""What every store promises of the recent load; on the in-memory twin and on a real Redis."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ampd.recent_load import RecentRound
from ampd.state import codec
from tests.ampd.state.contract_lab import HOSTILE_IDS, LONG_S, SHORT_S


def ended(ago_s: float, **facts: Any) -> RecentRound:
    now_s = time.monotonic()
    item = RecentRound(now_s - ago_s - 2.0, 16, 64)
    item.end(now_s - ago_s, 8, True)
    for name, value in facts.items():
        setattr(item, name, value)
    return item


async def test_rounds_come_back_with_their_times(cluster: Any) -> None:
    store = await cluster.store()
    assert list(await store.recent_load()) == []
    await store.record_load([("a", ended(5.0)), ("b", ended(4.0, is_met=False))], 60.0)
    await store.record_load([("a", ended(1.0))], 60.0)
    rounds = sorted(await store.recent_load(), key=lambda loaded: loaded[1].sent_s)
    now_s = time.monotonic()
    assert [name for name, _ in rounds] == ["a", "b", "a"]
    assert [item.is_met for _, item in rounds] == [True, False, True]
    for (_, item), ago_s in zip(rounds, (5.0, 4.0, 1.0), strict=True):
        assert item.ended_s is not None
        assert item.ended_s - item.sent_s == pytest.approx(2.0, abs=1e-3)
        assert now_s - item.ended_s == pytest.approx(ago_s, abs=1.0)
        assert (item.kept_tokens, item.prompt_tokens, item.output_tokens) == (16, 64, 8)


async def test_old_rounds_are_forgotten(cluster: Any, waiting: Any) -> None:
    store = await cluster.store()
    await store.record_load([("a", ended(1.0))], LONG_S)
    await store.record_load([("b", ended(1.0))], SHORT_S)

    async def is_empty() -> bool:
        return not await store.recent_load()

    await waiting.until(is_empty)


async def test_only_what_is_too_old_is_forgotten(cluster: Any, waiting: Any) -> None:
    store = await cluster.store()
    await store.record_load([("a", ended(1.0))], LONG_S)

    async def only_the_latest_is_left() -> bool:
        await store.record_load([("b", ended(1.0))], SHORT_S)
        return {name for name, _ in await store.recent_load()} == {"b"}

    await waiting.until(only_the_latest_is_left)


@pytest.mark.parametrize("session_id", HOSTILE_IDS)
async def test_any_session_id_comes_back(cluster: Any, session_id: str) -> None:
    store = await cluster.store()
    await store.record_load([(session_id, ended(1.0))], 60.0)
    assert [name for name, _ in await store.recent_load()] == [session_id]


@pytest.mark.parametrize(
    "record",
    [
        "",
        "{}",
        "[1]",
        '[["a",2,1,16,64,8]]',
        '[["a",1,2,16,64,8,1]]',  # ends before it begins
        '[["a",2,1,65,64,8,1]]',
        '[["a",2,1,-1,64,8,1]]',
        '[["a",2,NaN,16,64,8,1]]',
        "[[7,2,1,16,64,8,1]]",
        '[["a",2,1,16,6.4,8,1]]',
        f'[["a",2,1,16,64,{10**400},1]]',
    ],
)
def test_nonsense_is_refused(record: str) -> None:
    with pytest.raises(codec.CodecError):
        codec.decode_load(record, 100.0)
