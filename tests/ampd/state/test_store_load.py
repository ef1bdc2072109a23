"""What every store promises of the recent load; on the in-memory twin and on a real Redis."""

from __future__ import annotations

import json
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


SOUND = {"sent_s": -2, "kept_tokens": 16, "prompt_tokens": 64, "ended_s": -1, "output_tokens": 8, "is_met": True}


@pytest.mark.parametrize(
    "change",
    [
        {"sent_s": None},
        {"sent_s": -0.5},  # ends before it begins
        {"ended_s": 0.5},
        {"ended_s": None},
        {"kept_tokens": 65},
        {"kept_tokens": -1},
        {"prompt_tokens": 64.5},
        {"output_tokens": 10**400},
    ],
)
def test_a_nonsensical_round_is_refused(change: dict[str, Any]) -> None:
    assert len(codec.decode_load(json.dumps([["a", SOUND]]).encode(), 100.0)) == 1
    with pytest.raises(codec.CodecError):
        codec.decode_load(json.dumps([["a", SOUND | change]]).encode(), 100.0)


@pytest.mark.parametrize("record", [b"", b"{}", b"[1]", b'[["a"]]', b"[[7,{}]]"])
def test_nonsense_is_refused(record: bytes) -> None:
    with pytest.raises(codec.CodecError):
        codec.decode_load(record, 100.0)
