"""DynaServe: passes keep the ITL target."""

import pytest

from ampd.policies.registry import create
from ampd.types import Parallelism, RunningRound
from tests.ampd.policies import situations
from tests.ampd.policies.routing_lab import Mixing, round_of

# `Mixing`: 10 ms a pass and 1 ms a token; a step of n sequences takes 5 + n ms.
TP = Parallelism()
MIXING = Mixing()
PASSES = create("slicing", "dynaserve")


def test_a_pass_has_the_tokens_that_keep_the_target_with_the_step() -> None:
    batch = [RunningRound(5, 0.1, 0.04, 1000)] * 5
    assert situations.slice(PASSES, round_of(100, 400), batch, TP, MIXING, 0.0) == 25
    assert MIXING.mixed_pass_s([(100, 25)], 5, 5000, TP) == pytest.approx(0.04)
    assert situations.slice(PASSES, round_of(100, 20), batch, TP, MIXING, 0.0) == 20
    assert situations.slice(PASSES, round_of(100, 400), batch * 9, TP, MIXING, 0.0) == 16
    assert situations.slice(PASSES, round_of(100, 400), [], TP, MIXING, 0.0) == 400
