"""Grids keep within what an engine can take; held-out points are really left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.errors import UserError
from planner.profiler import Density, Grid, Limits, grid_of, split

LARGE = Limits(max_context_tokens=131_072, kv_capacity_tokens=1_000_000, page_tokens=16)


@given(
    density=st.sampled_from(Density),
    context=st.integers(256, 200_000),
    capacity=st.integers(512, 2_000_000),
    page=st.sampled_from([1, 16, 48]),
    most=st.none() | st.integers(256, 100_000),
)
def test_every_point_fits_the_engine(
    density: Density, context: int, capacity: int, page: int, most: int | None
) -> None:
    grid = grid_of(density, Limits(context, capacity, page), most)
    # Room for a token of output, and not more than was asked for.
    longest = min(context - 1, capacity - 1, most or context)
    assert all(hist + incr <= longest for hist, incr in grid.prefill)
    assert all(each <= longest and batch * each < capacity for batch, each in grid.decode)
    assert all(page <= tokens <= longest for tokens in grid.transfer)
    # Only whole pages are found in a cache again; any other history would be measured as a shorter one.
    assert all(hist % page == 0 for hist, _ in grid.prefill)
    assert all(incr <= longest and batch * each + incr < capacity for batch, each, incr in grid.mixed)
    assert len(set(grid.measurements())) == len(grid.measurements())


def test_denser_grids_have_more_points() -> None:
    sizes = [len(grid_of(density, LARGE).measurements()) for density in (Density.QUICK, Density.NORMAL, Density.FULL)]
    assert sizes[0] < sizes[1] < sizes[2]


def test_a_limit_of_tokens_leaves_out_longer_contexts() -> None:
    grid = grid_of(Density.NORMAL, LARGE, 1000)
    assert max(hist + incr for hist, incr in grid.prefill) <= 1000
    assert max(context for _, context in grid.decode) <= 1000
    assert max(grid.transfer) <= 1000


def test_an_empty_grid_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="the grid is empty") as refused:
        grid_of(Density.QUICK, LARGE, 40)
    assert "\n" not in str(refused.value)


@given(count=st.integers(3, 60), share=st.floats(0.01, 0.59), seed=st.integers(0, 5))
def test_a_split_parts_the_points_and_keeps_the_ends_for_the_fit(count: int, share: float, seed: int) -> None:
    points = list(range(count))
    fitted, held = split(points, share, seed)
    assert sorted(fitted + held) == points
    assert {0, count - 1} <= set(fitted)
    assert len(held) == min(count - 2, round(share * count))
    assert split(points, share, seed) == (fitted, held)


def test_another_seed_holds_out_other_points() -> None:
    assert len({tuple(split(range(40), 0.2, seed)[1]) for seed in range(5)}) > 1


def test_the_grid_keeps_within_the_engine() -> None:
    limits = Limits(max_context_tokens=1000, kv_capacity_tokens=4000, page_tokens=16)
    grid = grid_of(Density.FULL, limits)
    assert isinstance(grid, Grid)
    assert all(hist + incr < 1000 and hist % 16 == 0 for hist, incr in grid.prefill)
    assert all(batch * context <= 2000 for batch, context in grid.decode)
    assert all(tokens < 1000 for tokens in grid.transfer)
    assert max(hist + incr for hist, incr in grid_of(Density.FULL, limits, 300).prefill) <= 300
    with pytest.raises(UserError, match="the grid is empty"):
        grid_of(Density.NORMAL, Limits(20, 40, 16))


def test_held_out_points_are_inner_ones_and_never_fitted() -> None:
    fitted, held = split(list(range(50)), 0.2, 4)
    assert len(held) == 10
    assert sorted([*fitted, *held]) == list(range(50))
    assert 0 not in held
    assert 49 not in held
    assert split(list(range(50)), 0.2, 5)[1] != held
