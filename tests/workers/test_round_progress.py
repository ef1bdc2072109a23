"""What a worker measures of a round: where its KV was, its waits, its gaps, and the report at its end."""

from __future__ import annotations

import pytest

from ampd.types import PrefillTask, Slo
from workers.engines.base import EngineLoad, EngineOutput
from workers.kv.exchange import KvFetch
from workers.round_progress import RoundProgress

PAGE = 16
TASK = PrefillTask("t", "s", 64, 36, 0.0, Slo(1.0, 0.1))
LOAD = EngineLoad(3, 900, 1000)


def progress(kept_tokens: int = 0, tokens: int = 100) -> RoundProgress:
    return RoundProgress("r", TASK, [1] * tokens, arrived_s=10.0, kept_tokens=kept_tokens)


def counted(cached_tokens: int, reloaded_tokens: int = 0, reload_s: float = 0.0) -> EngineOutput:
    return EngineOutput([1], cached_tokens=cached_tokens, reloaded_tokens=reloaded_tokens, reload_s=reload_s)


def test_kv_from_a_peer_was_reloaded_from_the_store_and_counts_as_the_peers() -> None:
    round_ = progress()
    round_.fetched = KvFetch(tokens=32, bytes=3200, seconds=0.5)
    round_.set_tiers(counted(80, reloaded_tokens=48))
    assert round_.hit_tokens(PAGE) == {"device": 32, "store": 16, "peer": 32, "recomputed": 0}


def test_a_history_that_is_nowhere_is_recomputed_as_far_as_it_was_kept() -> None:
    round_ = progress(kept_tokens=97)
    assert round_.hit_tokens(PAGE) == {}, "the engine has not said so yet"
    round_.set_tiers(counted(32))
    assert round_.hit_tokens(PAGE)["recomputed"] == 96 - 32
    handed_over = progress(tokens=7 * PAGE)
    handed_over.handed_over_s = 11.0
    handed_over.set_tiers(counted(32))
    assert handed_over.hit_tokens(PAGE)["recomputed"] == 96 - 32, "all of the prompt but its last page"


def test_the_read_of_the_history_is_no_wait_in_the_queue() -> None:
    round_ = progress()
    round_.started_s = 12.0
    round_.fetched = KvFetch(seconds=0.5, error="slow")
    assert round_.queued_s == 1.5
    assert round_.report(LOAD, 0, {})["kv_read_error"] == "slow"
    round_.fetched = KvFetch(seconds=9.0)
    assert round_.queued_s == 0.0
    assert not {"kv_read_error", "reload_s"} & set(round_.report(LOAD, 0, {}))


def test_gaps_count_from_the_last_token_of_the_same_choice_or_from_the_hand_over() -> None:
    here = progress()
    assert not here.begins_to_decode()
    assert here.gap_s(0, 1, 11.0) is None
    assert here.gap_s(0, 4, 13.0) == 0.5
    assert here.gap_s(1, 1, 14.0) is None
    elsewhere = progress()
    elsewhere.handed_over_s = 11.0
    assert elsewhere.begins_to_decode()
    assert elsewhere.gap_s(0, 1, 11.25) == pytest.approx(0.25)
    assert not elsewhere.begins_to_decode()
