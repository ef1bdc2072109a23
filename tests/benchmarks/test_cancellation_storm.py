"""Clients that leave at random moments leave nothing behind; `python -m benchmarks.cancellation_storm` sends 10,000."""

from __future__ import annotations

import pytest

from benchmarks.cancellation_storm import LEFT_EARLY, LEFT_LATE, storm
from tests.waiting import PATIENCE_S


@pytest.mark.slow
async def test_nothing_is_left_of_rounds_whose_clients_have_gone() -> None:
    result = await storm(count=300, at_once=50, seed=1, bound_s=PATIENCE_S)
    assert result["left"] == {}
    assert result["ends"].keys() == {LEFT_EARLY, LEFT_LATE}
