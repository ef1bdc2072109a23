"""Where a prompt's KV comes from: every token from one place, the nearest one; when a read from a peer pays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.errors import UserError
from ampd.perf.presets import load_performance_model
from ampd.serving.kv_tiers import (
    TIERS,
    Found,
    Tiers,
    history_tokens,
    reading_pays,
    reloading_pays,
    reusable_tokens,
    tiers_of,
)
from ampd.types import Parallelism
from tests.ampd.policies.routing_lab import PlainModel, SlowHost

MODEL = load_performance_model("qwen3-32b-h20")
TP1 = Parallelism(1)
TOKENS = st.integers(0, 30_000)
FOUND = st.builds(Found, TOKENS, TOKENS, TOKENS)
DEGREES = st.sampled_from([Parallelism(tp) for tp in (1, 2, 4, 8)])


class SlowNetwork(PlainModel):
    """A read from a peer takes longer than a computation."""

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:  # noqa: ARG002
        return tokens / 100


@given(st.integers(1, 40_000), FOUND)
def test_every_token_has_one_origin_and_no_origin_gives_more_than_it_holds(prompt_tokens: int, found: Found) -> None:
    tiers = tiers_of(prompt_tokens, found, prompt_tokens)
    parts = (tiers.device_tokens, tiers.store_tokens, tiers.peer_tokens, tiers.computed_tokens)
    assert sum(parts) == prompt_tokens
    assert min(parts) >= 0
    assert tiers.computed_tokens >= 1
    assert tiers.device_tokens == min(found.device_tokens, prompt_tokens - 1)
    if tiers.store_tokens:
        assert tiers.device_tokens + tiers.store_tokens <= found.store_tokens
    if tiers.peer_tokens:
        assert tiers.reused_tokens <= found.peer_tokens
        assert tiers.device_tokens + tiers.store_tokens == max(found.device_tokens, found.store_tokens)


@given(st.integers(1, 40_000), TOKENS, TOKENS, DEGREES, DEGREES)
def test_a_read_is_never_predicted_to_be_slower_than_to_go_on_without_it(
    prompt_tokens: int, store_tokens: int, peer_tokens: int, parallelism: Parallelism, peer: Parallelism
) -> None:
    found = Found(store_tokens=store_tokens, peer_tokens=peer_tokens)
    with_read, *without = (tiers_of(prompt_tokens, found, kept) for kept in (prompt_tokens, store_tokens, 0))
    without_s = min(tiers.predicted_s(MODEL, parallelism, peer) for tiers in without)
    if reading_pays(prompt_tokens, store_tokens, peer_tokens, MODEL, parallelism, peer):
        assert with_read.peer_tokens > 0
        assert with_read.predicted_s(MODEL, parallelism, peer) <= without_s
    elif with_read.peer_tokens:
        assert with_read.predicted_s(MODEL, parallelism, peer) > without_s


@given(st.integers(1, 40_000), TOKENS, TOKENS, DEGREES, DEGREES)
def test_what_was_read_is_reloaded(
    prompt_tokens: int, store_tokens: int, peer_tokens: int, parallelism: Parallelism, peer: Parallelism
) -> None:
    if reading_pays(prompt_tokens, store_tokens, peer_tokens, MODEL, parallelism, peer):
        assert reloading_pays(prompt_tokens, min(prompt_tokens - 1, peer_tokens), MODEL, parallelism)


class WithoutReloads(PlainModel):
    """A profile that was made before profiles had times of reloads."""

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:
        raise UserError(f"no time of {tokens} tokens at {parallelism}")


@pytest.mark.parametrize(
    ("model", "pays"), [(PlainModel(), True), (SlowHost(), False), (WithoutReloads(), True)], ids=lambda of: type(of)
)
def test_a_reload_that_is_slower_than_computing_is_left_out(model: PlainModel, pays: bool) -> None:
    assert reloading_pays(1000, 900, model, TP1) is pays
    assert reloading_pays(1000, 0, model, TP1), "nothing is reloaded"


@given(st.integers(1, 40_000), FOUND, st.integers(0, 40_000))
def test_the_prompt_by_tier(prompt_tokens: int, found: Found, history_tokens: int) -> None:
    tiers = tiers_of(prompt_tokens, found, prompt_tokens)
    hits = tiers.hit_tokens(history_tokens, 16)
    assert tuple(hits) == TIERS
    assert sum(hits.values()) - hits["recomputed"] == tiers.reused_tokens
    assert hits["recomputed"] == max(history_tokens // 16 * 16 - tiers.reused_tokens, 0)


def test_the_nearest_place_gives_what_it_has() -> None:
    assert tiers_of(1000, Found(100, 400, 900), 1000) == Tiers(100, 300, 500, 100)
    assert tiers_of(1000, Found(500, 400, 300), 1000) == Tiers(500, 0, 0, 500)
    assert tiers_of(1000, Found(), 1000) == Tiers(0, 0, 0, 1000)


class SlowFromEight(PlainModel):
    """Reads from workers of TP 8 take longer than a computation."""

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:  # noqa: ARG002
        return tokens / 100 if source.tp == 8 else 0.0


@pytest.mark.parametrize(
    ("model", "peer_tp", "pays"),
    [
        (PlainModel(), 1, True),
        (SlowNetwork(), 1, False),
        (SlowHost(), 1, False),
        (SlowFromEight(), 1, True),
        (SlowFromEight(), 8, False),
    ],
    ids=["all fast", "slow network", "slow host", "fast peer", "slow peer"],
)
def test_a_read_that_is_slower_than_computing_is_left_out(model: PlainModel, peer_tp: int, pays: bool) -> None:
    assert reading_pays(1000, 400, 900, model, TP1, Parallelism(peer_tp)) is pays


def test_there_is_nothing_to_read_where_the_store_has_as_much() -> None:
    assert not reading_pays(1000, 900, 900, PlainModel(), TP1, TP1)
    assert not reading_pays(1, 0, 900, PlainModel(), TP1, TP1), "the last token is always computed"


@pytest.mark.parametrize(
    ("prompt", "held", "expected"), [(1, 0, 0), (1, 16, 0), (16, 16, 0), (17, 16, 16), (17, 99, 16), (40, 31, 16)]
)
def test_the_last_token_of_a_prompt_is_always_computed(prompt: int, held: int, expected: int) -> None:
    assert reusable_tokens(prompt, held, 16) == expected


@pytest.mark.parametrize(
    ("kept", "held", "expected"), [(0, 0, 0), (1, 0, 0), (16, 0, 0), (17, 0, 16), (405, 80, 400), (33, 64, 64)]
)
def test_an_eviction_does_not_shorten_the_history(kept: int, held: int, expected: int) -> None:
    assert history_tokens(kept, held, 16) == expected
