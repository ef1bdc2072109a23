"""The limit is one: no pass is shorter than the least work of what it computes."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.perf.presets import analytic_model
from ampd.types import Parallelism
from benchmarks.best_layouts.limit import LeastWork, limit_text, main, most_sessions_per_s
from benchmarks.policies.settings import Setting

PARALLELISM = Parallelism(2)
PARTS = st.lists(st.tuples(st.integers(0, 60_000), st.integers(1, 9_000)), max_size=6)
BATCH = st.tuples(st.integers(0, 500), st.integers(1, 30_000))


@cache
def work(model: str) -> LeastWork:
    return LeastWork(analytic_model(model, "h20"), PARALLELISM)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-32b", "mixtral-8x7b"])
@settings(deadline=None)
@given(PARTS, BATCH)
def test_no_pass_is_shorter_than_the_least_work_of_its_parts(
    model: str, parts: list[tuple[int, int]], batch: tuple[int, int]
) -> None:
    size, context_tokens = batch[0], batch[0] * batch[1]
    least_s = sum(work(model).prefill_s(*part) for part in parts) + work(model).decode_s(size, context_tokens)
    pass_s = analytic_model(model, "h20").mixed_pass_s(parts, size, context_tokens, PARALLELISM)
    assert least_s <= pass_s * (1 + 1e-6)
    if not parts:
        assert least_s <= analytic_model(model, "h20").decode_step_s(size, context_tokens, PARALLELISM) * (1 + 1e-6)


def limit(setting: Setting) -> float:
    found = most_sessions_per_s(setting, 0)
    assert found is not None
    return found


def test_a_load_that_ends_before_it_is_steady_has_none() -> None:
    long = Setting("qwen3-32b", "h20", "coding-agents", "2xTP4", "2xTP4", 8.0, 0.05, duration_s=600.0)
    assert most_sessions_per_s(long, 0) is None
    assert limit_text([None, None]) == "-"
    assert limit(replace(long, duration_s=3000.0)) > 0


def test_the_limit_grows_with_the_workers_and_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    two, four = (
        Setting("llama-3.1-8b", "h100", "tau-bench-airline", half, half, 0.3, 0.02) for half in ("1xTP1", "2xTP1")
    )
    assert limit(four) == pytest.approx(2 * limit(two), rel=1e-3)
    large = replace(four, decode="2xTP2")
    both_large = replace(four, prefill="2xTP2", decode="2xTP2")
    limits = [limit(each) for each in (four, large, both_large)]
    assert limits == sorted(limits)
    assert limits[1] == pytest.approx((limits[0] + limits[2]) / 2, rel=0.1), "nearly as good at both phases"
    assert main(["--only", "8b tau-bench-airline 1xTP1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "| llama-3.1-8b tau-bench-airline 1xTP1+1xTP1 h100 | 24.5 |"
