from types import SimpleNamespace
from typing import Any

import pytest

from ampd.serving.placement import Plan
from ampd.state.store import Binding
from ampd.types import Parallelism, PrefillTask, Route, RouteDecision, Slo
from router.placement import Placement
from router.worker_requests import continued_request, prefill_request
from tests.router.replica_lab import worker


@pytest.mark.parametrize(
    ("stops", "emitted", "left"),
    [
        ({"max_tokens": 10, "min_tokens": 4}, 3, {"max_tokens": 7, "min_tokens": 1}),
        ({"max_tokens": 10, "min_tokens": 4}, 6, {"max_tokens": 4, "min_tokens": 0}),
        ({"max_tokens": None, "min_tokens": None}, 6, {"max_tokens": None, "min_tokens": None}),
    ],
)
def test_a_continued_request_owes_what_is_left(stops: dict[str, Any], emitted: int, left: dict[str, Any]) -> None:
    request = {"sampling_options": {"temperature": 0}, "stop_conditions": stops}
    before = dict(stops)
    assert continued_request(request, emitted) == {**request, "stop_conditions": left}
    assert stops == before


@pytest.mark.parametrize(("hist_tokens", "source"), [(0, (None, None)), (160, ("d1", 2))])
def test_a_prefill_names_the_worker_that_has_its_history(
    hist_tokens: int, source: tuple[str | None, int | None]
) -> None:
    plan = Plan(
        worker("d1", parallelism=Parallelism(2)),
        RouteDecision(Route.REMOTE, "p1", "cheapest"),
        PrefillTask("t", "s", hist_tokens, 16, 0.0, Slo(1.0, 0.1)),
    )
    placement = Placement(Binding("s", "d1", 1), plan, is_shared=True)
    request: Any = SimpleNamespace(token_ids=[1], engine_request={})
    message = prefill_request(request, [], placement, 0.0, kept_tokens=150)
    assert (message["source_worker_id"], message.get("source_tp")) == source
    assert message.get("kept_tokens") == 150
