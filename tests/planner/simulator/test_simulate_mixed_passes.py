"""Prefills and decode steps in one pass, or one after the other."""

from dataclasses import replace
from itertools import pairwise

import pytest

from ampd.perf.piecewise import PiecewiseModel
from ampd.types import Parallelism
from planner.simulator.options import SimulationOptions
from tests.ampd.serving.fixed_slices import FixedSlices

from .lab import APART, LOCAL, MODEL, run, session, single

TP1 = Parallelism(1)
TALK_AND_PROMPT = [session("talks", (160, 200)), session("reads", (4096, 2), arrival_s=0.3)]
CUT = replace(LOCAL, slicing=FixedSlices(512))


def test_a_part_of_a_prefill_and_a_step_take_the_time_of_one_pass_or_of_two() -> None:
    for model, expected_s in (
        (MODEL, MODEL.mixed_pass_s([(4096 - 512, 512)], 1, 250, TP1)),
        (APART, MODEL.prefill_s(4096 - 512, 512, TP1) + MODEL.decode_step_s(1, 250, TP1)),
    ):
        gaps = run(TALK_AND_PROMPT, single(prefill=0), CUT, model=model).gaps
        assert max(gap.first_s for gap in gaps) == pytest.approx(expected_s, rel=0.01)


@pytest.mark.parametrize("model", [MODEL, APART], ids=["mixed", "apart"])
def test_only_where_the_batch_has_paused_it_makes_a_step_between_two_passes(model: PiecewiseModel) -> None:
    done = run(TALK_AND_PROMPT, single(prefill=0), CUT, SimulationOptions(keeps_timeline=True), model=model)
    spans = [span for span in done.timeline if span.detail.get("session") == "reads" and span.kind == "prefill"]
    gaps_s = [after.start_s - before.end_s for before, after in pairwise(spans)]
    assert len(gaps_s) == 7
    step_s = MODEL.decode_step_s(1, 250, TP1)
    assert gaps_s == ([0.0] * 7 if model is MODEL else pytest.approx([step_s] * 7, rel=0.01))
