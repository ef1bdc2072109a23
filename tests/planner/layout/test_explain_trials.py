"""The explanation never contradicts the trials: any trials of any seeds, and what is said about them."""

from __future__ import annotations

import re
from statistics import fmean
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from planner.layout.appraisal import Appraised, Appraiser
from planner.layout.demand import Demand
from planner.layout.explain import sentences, slack_of
from planner.layout.layout import Layout
from planner.layout.plan import GoodputPlan
from planner.layout.trial import Trial, TrialTask
from planner.layout.trials import Trials
from planner.plan_result import _layout
from planner.sustained import IN_TIME

from .lab import CASE, MadeAtOnce

LAYOUT = Layout((), ((1, 1),))
SIMULATED: dict[str, Any] = {
    "errors": 0,
    "lost_sessions": 0,
    "ttft_s": {"p95": 0.1},
    "mean_itl_s": {"p95": 0.01},
}
NOISE = st.lists(st.floats(-0.15, 0.1), min_size=7, max_size=7)
RATE = 2.0


class Noisy(MadeAtOnce):
    """Trials in which fewer rounds are met and fewer sessions are in time the higher the rate, with noise."""

    def __init__(self, limit: float, noise: list[float], late_share: float) -> None:
        self.limit, self.noise, self.late_share = limit, noise, late_share
        self.made: dict[tuple[int, float], Trial] = {}

    def trials(self, tasks: list[TrialTask]) -> list[Trial]:
        return [self.made.setdefault((task.seed, task.rate), self._trial(task)) for task in tasks]

    def known(self, task: TrialTask) -> Trial | None:
        return self.made.get((task.seed, task.rate))

    def _trial(self, task: TrialTask) -> Trial:
        number = task.seed * 3 + round(task.rate * 1000)
        over = task.rate / self.limit - 1 + self.noise[number % 7]
        met = min(max(CASE.attainment - over, 0.0), 1.0)
        in_time = min(max(IN_TIME - self.noise[(number + 3) % 7] - over / 2, 0.0), 1.0)
        late, slow = (1 - met) * self.late_share, (1 - met) * (1 - self.late_share)
        return Trial(met, late, slow, in_time, result=SIMULATED, most=met)


@st.composite
def plans(draw: st.DrawFn) -> tuple[GoodputPlan, Noisy]:
    trials = Noisy(draw(st.floats(0.5, 9.0)), draw(NOISE), draw(st.sampled_from([0.1, 0.9])))
    appraiser = Appraiser(CASE, cast(Trials, trials), RATE)
    seeds = draw(st.sampled_from([1, 3, 6]))
    appraiser.check([LAYOUT], seeds)
    if draw(st.booleans()):
        appraiser.search_goodput([LAYOUT], seeds, RATE)
    appraised = appraiser.appraised(LAYOUT)
    return GoodputPlan([appraised], RATE, CASE.attainment, Demand(RATE, 1e5, 5e3), [], None, "", 40), trials


@given(plans())
def test_what_is_said_agrees_with_the_trials(made: tuple[GoodputPlan, Noisy]) -> None:
    plan, trials = made
    best = plan.layouts[0]
    text = "\n".join(sentences(plan, CASE, {}))
    seeds = range(best.attainment.seeds)
    checks = [trials.made[seed, RATE] for seed in seeds]
    carries = fmean(t.met for t in checks) >= CASE.attainment and fmean(t.in_time for t in checks) >= IN_TIME
    assert ("carries the most" in text) == plan.carries == carries
    assert ("was found to carry" in text) == (not carries and "No layout" in text)
    assert f"At 2 sessions/s it attains {fmean(t.met for t in checks):.1%}" in text
    if best.goodput is not None:
        assert carries == (best.goodput.mean >= RATE)
    _check_limit(text, plan, best, trials)
    for point in _layout(best, plan, CASE)["curve"]:
        if best.goodput is not None and point["rate"] <= best.goodput.mean:
            assert point["carries"]
        if carries and point["rate"] == RATE and best.goodput is not None:
            assert point["carries"]


def _check_limit(text: str, plan: GoodputPlan, best: Appraised, trials: Noisy) -> None:
    """What binds: a rate above the one that is carried, and the misses of its own trial."""
    binds = slack_of(best, plan, CASE).binds
    found = re.search(r"at (\S+) sessions/s (\d+)% of the rounds miss TTFT and (\d+)% miss ITL", text)
    assert (found is None) == (binds in {"unknown", "nothing"})
    if found is None:
        return
    said, trial = min(
        ((rate, trial) for (seed, rate), trial in trials.made.items() if not seed),
        key=lambda item: abs(item[0] - float(found[1])),
    )
    assert f"{trial.late:.0%}" == f"{found[2]}%"
    assert f"{trial.slow:.0%}" == f"{found[3]}%"
    assert not trial.carries(plan.attainment)
    assert said > (best.goodput.mean if best.goodput else 0.0)
    assert said > RATE or not plan.carries
    assert (binds == "sessions") == (trial.met >= plan.attainment)
    assert (f"{1 - trial.in_time:.1%} of the sessions end too late" in text) == (binds == "sessions")
    assert binds == "sessions" or (binds == "prefill") == (trial.late >= trial.slow)
