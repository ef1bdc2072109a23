from typing import Any

import pytest

from router.worker_requests import continued_request


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
