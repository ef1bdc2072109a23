"""Measuring: round robin, a first repeat that only warms up, medians, and no point that did not come about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from planner.profiler import Grid, Points, Seen, left_to_measure, measure

GRID = Grid(prefill=((0, 16), (64, 32)), decode=((1, 100), (4, 200)), transfer=(64,), mixed=((4, 200, 64),))
Key = tuple[str, ...] | tuple[str | int, ...]


class ScriptedProbe:
    """A probe whose seconds follow from the point and from how often it was asked."""

    def __init__(self, seconds: Callable[[Key, int], float | None]) -> None:
        self._seconds = seconds
        self.asked: list[Key] = []

    async def prefill_s(self, hist_tokens: int, incr_tokens: int) -> float | None:
        return self._ask(("prefill", hist_tokens, incr_tokens))

    async def decode_step_s(self, batch: int, context_tokens: int) -> float | None:
        return self._ask(("decode", batch, context_tokens))

    async def mixed_pass_s(self, batch: int, context_tokens: int, incr_tokens: int) -> float | None:
        return self._ask(("mixed", batch, context_tokens, incr_tokens))

    async def transfer_s(self, tokens: int) -> float | None:
        return self._ask(("transfer", tokens))

    async def reload_s(self, tokens: int) -> float | None:
        return self._ask(("reload", tokens))

    def _ask(self, key: Key) -> float | None:
        self.asked.append(key)
        return self._seconds(key, self.asked.count(key) - 1)


async def measured(probe: ScriptedProbe, repeats: int = 3, seed: int = 0) -> tuple[Points, int]:
    steps: list[None] = []
    points = await measure(probe, GRID, repeats, seed, lambda: steps.append(None), {})
    assert len(steps) == left_to_measure(GRID, repeats, {})
    return points, len(steps)


async def test_every_repeat_has_every_point_once_before_the_next_begins() -> None:
    probe = ScriptedProbe(lambda _key, _turn: 1.0)
    _, steps = await measured(probe)
    size = len(GRID.measurements())
    assert steps == len(probe.asked) == 4 * size
    repeats = [probe.asked[index : index + size] for index in range(0, len(probe.asked), size)]
    assert all(set(Counter(repeat).values()) == {1} for repeat in repeats)
    assert len({tuple(repeat) for repeat in repeats}) > 1, "the order is a new one in each repeat"


async def test_the_warm_up_does_not_count_and_medians_are_taken() -> None:
    # 100 s while warming up, then 1, 9 and 2.
    points, _ = await measured(ScriptedProbe(lambda _key, turn: (100.0, 1.0, 9.0, 2.0)[turn]))
    assert points.prefill == [(0, 16, 2.0), (64, 32, 2.0)]
    assert points.decode == [(1, 100, 2.0), (4, 800, 2.0)], "context of the whole batch"
    assert points.transfer == points.reload == [(64, 2.0)]
    assert points.mixed == [(4, 800, 64, 2.0)]
    assert points.discarded == 0


async def test_what_did_not_come_about_is_left_out_and_counted() -> None:
    def seconds(key: Key, turn: int) -> float | None:
        if key == ("prefill", 64, 32):
            return None
        return None if key == ("transfer", 64) and turn == 2 else float(turn)

    points, _ = await measured(ScriptedProbe(seconds))
    assert points.prefill == [(0, 16, 2.0)]
    assert points.transfer == [(64, 2.0)], "the median of 1 and 3"
    assert points.discarded == 3 + 1


async def test_the_same_seed_gives_the_same_order() -> None:
    asked = []
    for seed in (1, 1, 2):
        probe = ScriptedProbe(lambda _key, _turn: 1.0)
        await measured(probe, seed=seed)
        asked.append(probe.asked)
    assert asked[0] == asked[1] != asked[2]


@pytest.mark.parametrize("cut", range(0, 4 * 7, 3))
async def test_a_run_that_was_cut_goes_on_with_the_points_that_lack_measurements(cut: int) -> None:
    def on_measured() -> None:
        if len(first.asked) > cut:
            raise InterruptedError

    seen: Seen = {}
    first, second = (ScriptedProbe(lambda key, _turn: None if key[0] == "mixed" else float(key[1])) for _ in range(2))
    with pytest.raises(InterruptedError):
        await measure(first, GRID, 3, 0, on_measured, seen)
    expected = {name: 4 - len(seen.get(name, ())) for name in GRID.measurements()}
    expected = {name: count for name, count in expected.items() if count > 1}
    assert left_to_measure(GRID, 3, seen) == sum(expected.values())
    points = await measure(second, GRID, 3, 1, lambda: None, seen)
    assert Counter(second.asked) == expected, "each of them warms up again"
    whole = ScriptedProbe(lambda key, _turn: None if key[0] == "mixed" else float(key[1]))
    assert points == (await measured(whole))[0]
