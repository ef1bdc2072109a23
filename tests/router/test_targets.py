"""The targets of a round: the graph's, or the client's within the graph's limits."""

from typing import Any

import pytest

from ampd.types import Slo
from router.round_errors import RoundRefusedError
from router.targets import TargetLimits

DEFAULT = Slo(ttft_s=2.0, itl_s=0.1)
WIDE = TargetLimits(DEFAULT, floor=1e-9, cap=1e9)


def slo(**request: Any) -> Slo:
    return WIDE.of(request)[0]


def test_targets_are_milliseconds_and_optional_one_by_one() -> None:
    assert slo(router={"ttft_target": 350.0, "itl_target": 40.0}) == Slo(ttft_s=0.35, itl_s=0.04)
    assert slo(router={"ttft_target": 350.0}) == Slo(ttft_s=0.35, itl_s=0.1)
    assert slo(router=None) == slo() == DEFAULT


def test_targets_may_come_as_annotations_which_completions_keep() -> None:
    annotations = ["formatted_prompt", "ttft_target:350.0", "itl_target:40"]
    assert slo(annotations=annotations) == Slo(ttft_s=0.35, itl_s=0.04)
    assert slo(annotations=["itl_target:40"]) == Slo(ttft_s=2.0, itl_s=0.04)
    assert slo(annotations=annotations, router={"ttft_target": 500.0}) == Slo(ttft_s=0.5, itl_s=0.04)


@pytest.mark.parametrize("annotation", ["ttft_target:soon", "ttft_target:-1", "ttft_target:nan", "ttft_target:"])
def test_annotations_that_are_no_positive_number_are_refused(annotation: str) -> None:
    with pytest.raises(RoundRefusedError, match="ttft_target must be a positive number of milliseconds"):
        slo(annotations=[annotation])


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "100", True, [5], -(10**400)])
def test_targets_that_are_no_positive_number_are_refused(value: Any) -> None:
    with pytest.raises(RoundRefusedError, match="milliseconds") as refusal:
        slo(router={"itl_target": value})
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    ("ttft_ms", "itl_ms", "expected", "clamped"),
    [
        (1000, 50, Slo(1.0, 0.05), ()),
        (20_000, 1000, Slo(20.0, 1.0), ()),
        (5e-324, 40, Slo(1.0, 0.05), ("ttft_target", "itl_target")),
        (1e300, 100, Slo(20.0, 0.1), ("ttft_target",)),
        (10**400, 10**400, Slo(20.0, 1.0), ("ttft_target", "itl_target")),
    ],
)
def test_a_target_outside_of_the_limits_becomes_the_nearest_limit(
    ttft_ms: float, itl_ms: float, expected: Slo, clamped: tuple[str, ...]
) -> None:
    chosen = TargetLimits(DEFAULT).of({"router": {"ttft_target": ttft_ms, "itl_target": itl_ms}})
    assert chosen == (expected, clamped)
