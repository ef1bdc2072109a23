"""What a manifest tells about a layout that misses the targets."""

from typing import Any

from planner.manifest.planned import miss


def test_a_miss_has_the_rate_that_is_carried_where_it_is_known() -> None:
    layout: dict[str, Any] = {"meets_slo": False, "headroom": 0.75, "attainment": {"mean": 0.5}}
    assert miss(layout) == "it carries 75% of the rate, and attains 50.0% of the rounds at the planned rate"
    assert miss(layout | {"headroom": None}) == "it attains 50.0% of the rounds at the planned rate"
    assert miss(layout | {"meets_slo": True}) is None
