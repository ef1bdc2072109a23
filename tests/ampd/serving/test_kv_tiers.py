"""Where a prompt's KV comes from: every token from one place, the nearest one, and never slower than computing it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.piecewise import load_performance_model
from ampd.serving.kv_tiers import Found, Tiers, fastest_tiers, tiers_of
from ampd.types import Parallelism
from tests.ampd.policies.routing_lab import PlainModel

MODEL = load_performance_model("qwen3-32b-h20")
TP1 = Parallelism(1)
TOKENS = st.integers(0, 30_000)
FOUND = st.builds(Found, TOKENS, TOKENS, TOKENS)
DEGREES = st.sampled_from([Parallelism(tp) for tp in (1, 2, 4, 8)])


class SlowHost(PlainModel):
    """A reload takes longer than a computation."""

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return tokens / 100


class SlowNetwork(PlainModel):
    """A read from a peer takes longer than a computation."""

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:  # noqa: ARG002
        return tokens / 100


@given(st.integers(1, 40_000), FOUND, DEGREES, DEGREES)
def test_every_token_has_one_origin_and_no_origin_gives_more_than_it_holds(
    prompt_tokens: int, found: Found, parallelism: Parallelism, peer: Parallelism
) -> None:
    tiers = fastest_tiers(prompt_tokens, found, MODEL, parallelism, peer)
    parts = (tiers.device_tokens, tiers.store_tokens, tiers.peer_tokens, tiers.computed_tokens)
    assert sum(parts) == prompt_tokens
    assert min(parts) >= 0
    assert tiers.computed_tokens >= 1
    assert tiers.device_tokens == min(found.device_tokens, prompt_tokens - 1)
    if tiers.store_tokens:
        assert tiers.device_tokens + tiers.store_tokens <= found.store_tokens
    if tiers.peer_tokens:
        assert tiers.kept_tokens <= found.peer_tokens
        assert tiers.device_tokens + tiers.store_tokens == max(found.device_tokens, found.store_tokens)


@given(st.integers(1, 40_000), FOUND, DEGREES, DEGREES)
def test_no_other_end_of_the_kept_part_is_predicted_to_be_faster(
    prompt_tokens: int, found: Found, parallelism: Parallelism, peer: Parallelism
) -> None:
    chosen_s = fastest_tiers(prompt_tokens, found, MODEL, parallelism, peer).predicted_s(MODEL, parallelism, peer)
    for end in (found.device_tokens, found.store_tokens, found.peer_tokens):
        if end >= found.device_tokens:
            assert chosen_s <= tiers_of(prompt_tokens, found, end).predicted_s(MODEL, parallelism, peer)


@given(st.integers(1, 40_000), FOUND, st.integers(0, 40_000))
def test_the_tiers_of_a_history_add_up_to_it(prompt_tokens: int, found: Found, history_tokens: int) -> None:
    history_tokens = min(history_tokens, prompt_tokens)
    tiers = fastest_tiers(prompt_tokens, found, MODEL, TP1)
    hits = tiers.of_history(history_tokens)
    assert sum(hits.values()) == history_tokens
    assert hits["recomputed"] == max(history_tokens - tiers.kept_tokens, 0)


def test_the_nearest_place_gives_what_it_has() -> None:
    assert fastest_tiers(1000, Found(100, 400, 900), MODEL, TP1) == Tiers(100, 300, 500, 100)
    assert fastest_tiers(1000, Found(500, 400, 300), MODEL, TP1) == Tiers(500, 0, 0, 500)
    assert fastest_tiers(1000, Found(), MODEL, TP1) == Tiers(0, 0, 0, 1000)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (PlainModel(), Tiers(100, 300, 500, 100)),
        (SlowNetwork(), Tiers(100, 300, 0, 600)),
        (SlowHost(), Tiers(100, 0, 0, 900)),
    ],
    ids=["all fast", "slow network", "slow host"],
)
def test_what_is_slower_than_computing_is_left_out(model: PlainModel, expected: Tiers) -> None:
    assert fastest_tiers(1000, Found(100, 400, 900), model, TP1) == expected
