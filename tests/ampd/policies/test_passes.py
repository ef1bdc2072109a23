"""The shortest pass, of dense models and of mixtures of experts, and what our policies make of the latter."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.perf.model import ScaledModel
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import analytic_model, model_shape
from ampd.perf.profile import MixedPassCosts
from ampd.policies.base import Run
from ampd.policies.estimates import mixing_pays, shortest_pass_s
from ampd.policies.ordering.on_time import OnTimeOrdering
from ampd.policies.routing.predictive import PredictiveRouting
from ampd.types import Parallelism, PrefillTask, Slo
from tests.ampd.policies import situations
from tests.ampd.policies.routing_lab import PLAIN, decode, prefill, round_of

SHAPE = model_shape("mixtral-8x7b")
MIXTURE, DENSE = analytic_model("mixtral-8x7b", "h20"), analytic_model("llama-3.1-8b", "h20")
TP2 = Parallelism(2)
degrees = pytest.mark.parametrize("tp", [2, 4, 8])
untimed = settings(deadline=None)


def mixture_s(incr_tokens: int, hist_tokens: int = 0) -> float:
    return MIXTURE.prefill_s(hist_tokens, incr_tokens, TP2)


# -- the shortest pass


@untimed
@given(st.integers(0, 30_000), st.sampled_from([2, 4, 8]), st.sampled_from([MIXTURE, DENSE]))
def test_it_is_the_pass_of_a_page_behind_the_history(hist: int, tp: int, model: PiecewiseModel) -> None:
    assert shortest_pass_s(model, hist, Parallelism(tp)) == model.prefill_s(hist, 16, Parallelism(tp))


def test_it_is_a_page_in_plain_figures() -> None:
    assert shortest_pass_s(PLAIN, 0, TP2) == pytest.approx(0.026)


@degrees
def test_a_pages_pass_reads_nearly_all_experts_and_one_tokens_does_not(tp: int) -> None:
    every_s = MIXTURE.prefill_s(0, 32, Parallelism(tp))
    assert shortest_pass_s(MIXTURE, 0, Parallelism(tp)) > 0.95 * every_s
    assert MIXTURE.prefill_s(0, 1, Parallelism(tp)) < 0.6 * every_s
    # By the weights themselves: a token chooses 2 of 8 experts, a page leaves out one in a hundred.
    whole_bytes = SHAPE.read_bytes(1e9)
    assert SHAPE.read_bytes(16) > 0.98 * whole_bytes
    assert SHAPE.read_bytes(1) < 0.3 * whole_bytes


@degrees
def test_of_a_dense_model_a_token_reads_as_much_as_a_page(tp: int) -> None:
    assert shortest_pass_s(DENSE, 0, Parallelism(tp)) < 1.05 * DENSE.prefill_s(0, 1, Parallelism(tp))


# -- our policies with a mixture: two tokens' worth of experts are no pass to count in


def test_short_prefills_of_a_mixture_go_together() -> None:
    queue = [PrefillTask(f"t{i}", f"s{i}", 0, 100, 0.0, Slo(1.0 + i, 0.04)) for i in range(4)]
    page_s = shortest_pass_s(MIXTURE, 0, TP2)
    # Three passes are worth more than two hundred tokens and less than three hundred.
    assert mixture_s(200) < 3.0 * page_s < mixture_s(300)
    ordering = OnTimeOrdering()
    assert situations.pick(ordering, queue, TP2, MIXTURE, 0.0, random.Random(0)) == Run(0, (), (1,))


def test_short_prefills_queued_for_a_mixture_pay_for_its_experts_once() -> None:
    policy = PredictiveRouting(spread=0.0)
    worker = replace(prefill("p", 40, 40, 40), parallelism=TP2)
    here = replace(decode(9000), parallelism=TP2)
    decision = situations.route(policy, round_of(0, 100), here, (worker,), MIXTURE, 0.0, random.Random(0))
    page_s = shortest_pass_s(MIXTURE, 0, TP2)
    there = next(estimate for estimate in decision.estimates if estimate.worker_id == "p")
    assert there.queue_s == pytest.approx(mixture_s(40) + 2 * (mixture_s(40) - page_s))
    assert there.queue_s < 1.1 * mixture_s(40)


# -- mixed passes


def test_a_mixed_pass_reads_the_weights_once() -> None:
    apart_s = DENSE.prefill_s(0, 128, TP2) + DENSE.decode_step_s(8, 4000, TP2)
    mixed_s = DENSE.mixed_pass_s([(0, 128)], 8, 4000, TP2)
    attention_s = DENSE.decode_step_s(8, 4000, TP2) - DENSE.decode_step_s(8, 0, TP2)
    assert mixed_s == pytest.approx(DENSE.prefill_s(0, 136, TP2) + attention_s)
    assert mixing_pays(DENSE, 0, 128, 8, 4000, TP2)
    assert mixed_s < apart_s


@pytest.mark.parametrize(("saved", "per_context_s", "pays"), [(0.0, 0.0, False), (0.5, 0.0, True), (0.5, 1e-6, False)])
def test_what_was_measured_with_a_backend_decides(saved: float, per_context_s: float, pays: bool) -> None:
    costs = MixedPassCosts(saved=saved, context_s_per_token=per_context_s)
    known = tuple(each.model_copy(update={"mixed_passes": {"fa3": costs}}) for each in DENSE.profile.workers)
    profile = DENSE.profile.model_copy(update={"workers": known})
    for backend in ("fa3", None):
        model = PiecewiseModel(profile, backend=backend)
        assert mixing_pays(model, 0, 128, 8, 8000, TP2) is pays
        assert mixing_pays(ScaledModel(model, 2.0, 2.0, 2.0), 0, 128, 8, 8000, TP2) is pays
    apart_s = DENSE.prefill_s(0, 128, TP2) + DENSE.decode_step_s(8, 8000, TP2)
    saved_s = apart_s - DENSE.mixed_pass_s([(0, 128)], 8, 8000, TP2)
    measured_s = PiecewiseModel(profile, backend="fa3").mixed_pass_s([(0, 128)], 8, 8000, TP2)
    assert measured_s == pytest.approx(apart_s - saved * saved_s + 8000 * per_context_s)
    other = PiecewiseModel(profile, backend="triton")
    assert other.mixed_pass_s([(0, 128)], 8, 8000, TP2) == pytest.approx(apart_s), "it was not measured"
    assert not mixing_pays(other, 0, 128, 8, 8000, TP2)
