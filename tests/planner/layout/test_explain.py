"""What the explanation says where the ranking by simulation and the programme disagree."""

from dataclasses import replace
from typing import Any

from planner.layout.explain import sentences, slack_of
from planner.layout.formulation import Capacities, Choice, Demand
from planner.layout.layout import Layout
from planner.layout.search import Checked, Plan

TABLE = {1: [0.0, 1.0], 2: [2.0, 2.0]}
CAPACITIES = Capacities((0.9, 1.2), TABLE, TABLE, {1: 100.0, 2: 100.0})
SIMULATED: dict[str, Any] = {"attainment": {"rounds": 1.0}, "errors": 0}
SMALL = Choice(Layout(((1, 1),), ((1, 1),)), 1, 1.0)
LARGE = Choice(Layout(((2, 1),), ((2, 1),)), 0, 2.0)


def explained(
    *choices: Choice, left_out: dict[int, str] | None = None, errors: int = 0, following: Choice | None = None
) -> str:
    simulated = SIMULATED | {"errors": errors}
    next_step = following and (1, following)
    plan = Plan([Checked(choice, simulated) for choice in choices], CAPACITIES, Demand(1.0), next_step)
    return "\n".join(sentences(plan, 4, left_out or {}))


def test_no_layout_is_said_to_miss_the_targets_only_if_all_do() -> None:
    assert "No layout meets the targets at P95: this one misses by 20%" in explained(SMALL)
    both = explained(SMALL, LARGE)
    assert "No layout" not in both
    assert f"it misses by 20% and {LARGE.layout} meets the targets" in both
    assert "No layout" not in explained(LARGE, SMALL)


def test_the_next_gpu_names_the_figure_that_changes() -> None:
    faster = explained(SMALL, following=LARGE)
    assert "P95 at 0.90 instead of 1.20 of the target, 2.00 times the rate at that level." in faster
    more = explained(LARGE, following=replace(LARGE, headroom=3.0))
    assert "3.00 instead of 2.00 times the rate, P95 as before." in more


def test_every_degree_left_out_has_its_own_reason() -> None:
    text = explained(LARGE, left_out={4: "too heavy", 8: "too heavy", 16: "too small"})
    assert "TP4, TP8 left out: too heavy." in text
    assert "TP16 left out: too small." in text


def test_rounds_that_nobody_can_serve_are_said() -> None:
    assert "refused" not in explained(LARGE)
    assert "113 rounds were refused, because their context is longer" in explained(LARGE, errors=113)


def test_the_memory_that_is_short_is_named() -> None:
    stores = replace(CAPACITIES, store_tokens={1: 1000.0, 2: 1000.0})
    for demand, binds, kv_memory, host_memory in (
        (Demand(1.0, 100.0, 50.0), "grid", 2.0, 10.0),
        (Demand(1.0, 1000.0, 50.0), "host_memory", 2.0, 1.0),
        (Demand(1.0, 1000.0, 100.0), "kv_memory", 1.0, 1.0),
    ):
        slack = slack_of(LARGE, stores, demand, 4)
        assert (slack.binds, slack.kv_memory, slack.host_memory) == (binds, kv_memory, host_memory)
    slack = slack_of(LARGE, CAPACITIES, Demand(1.0, 100.0, 50.0), 4)
    assert (slack.binds, slack.kv_memory, slack.host_memory) == ("kv_memory", 1.0, None)
