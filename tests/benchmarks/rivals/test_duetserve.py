"""DuetServe: one pass while that keeps the ITL target, else a part of the GPU for each."""

import pytest

from ampd.policies.base import Compute
from ampd.policies.registry import create
from ampd.types import Parallelism, RunningRound
from planner.simulator.steps import EngineTimes
from tests.ampd.policies import situations
from tests.ampd.policies.routing_lab import PLAIN, round_of

# `PLAIN`: 10 ms a pass and 1 ms a token; a step of n sequences takes 5 + n ms. In a pass with the step of n sequences
# these are n tokens more.
TP = Parallelism()
DUET = create("slicing", "duetserve")


def running(count: int, itl_slo_s: float = 0.04) -> list[RunningRound]:
    return [RunningRound(5, 0.1, itl_slo_s, 1000)] * count


def cut(incr: int, batch: list[RunningRound]) -> Compute:
    answer = situations.slice(DUET, round_of(100, incr), batch, TP, PLAIN, 0.0)
    assert isinstance(answer, Compute)
    return answer


def test_alone_it_takes_the_budget() -> None:
    assert cut(400, []) == Compute(400)
    assert cut(9000, []) == Compute(8192)


def test_a_pass_within_the_target_is_shared() -> None:
    # 10 ms, 25 tokens and 5 sequences are exactly 40 ms.
    assert cut(25, running(5)) == Compute(25, decode_share=0.0)
    assert cut(26, running(5)).decode_share != 0.0


def test_a_longer_one_gets_what_the_decodes_leave_of_the_gpu() -> None:
    # A step of 10 ms takes 40 ms on a twelfth of the GPU, which has a quarter of the bandwidth.
    part = cut(400, running(5))
    assert part == Compute(26, decode_share=pytest.approx(1 / 12))  # type: ignore[arg-type]
    # The other eleven twelfths compute 36.7 ms of the whole GPU's work meanwhile: 10 ms and 26 tokens.
    times = EngineTimes(PLAIN, TP)
    assert times.mixed_pass_s([(100, 26)], 5, 5000, 1 / 12) == pytest.approx(0.04)
    assert times.mixed_pass_s([(100, 400)], 5, 5000, 1 / 12) == pytest.approx(0.41 * 12 / 11)


def test_the_strictest_target_of_the_batch_holds() -> None:
    assert cut(400, [*running(4, 0.1), *running(1, 0.03)]) == cut(400, running(5, 0.03))


def test_a_batch_that_is_late_anyway_keeps_the_whole_bandwidth() -> None:
    part = cut(400, running(45))
    assert part.decode_share == pytest.approx(1 / 3)
    assert part.tokens == 23, "two thirds of the 50 ms of a step"


def test_a_part_has_sixteen_tokens_at_least_and_never_more_than_is_left() -> None:
    assert cut(400, running(5, 0.012)).tokens == 16
    assert cut(3, running(5, 0.012)).tokens == 3
