"""Bindings with a further term choose by it."""

import random

import pytest

from ampd.perf.presets import analytic_model
from ampd.policies.base import BindingSituation
from ampd.types import Parallelism, PrefillTask, Role, Slo, WorkerView
from benchmarks.binding_terms import BINDINGS

TP = Parallelism(4)
SLO = Slo(1.0, 0.04)


def worker(name: str, sessions: int, tokens: int, capacity_tokens: int, batch: int = 0) -> WorkerView:
    return WorkerView(
        name,
        Role.DECODE,
        TP,
        decode_batch=batch,
        decode_context_tokens=1000 * batch,
        kv_used_tokens=tokens,
        kv_capacity_tokens=capacity_tokens,
        held_tokens={f"s{number}": tokens // sessions for number in range(sessions)} if sessions else {},
    )


def chosen(binding: str, *workers: WorkerView, prompt_tokens: int = 1000) -> str:
    task = PrefillTask("t", "new", 0, prompt_tokens, 0.0, SLO)
    situation = BindingSituation(
        model=analytic_model("qwen3-32b", "h20"), now_s=0.0, task=task, decode=workers, rng=random.Random(0)
    )
    return BINDINGS[binding].bind(situation)


@pytest.mark.parametrize(
    ("binding", "expected"),
    [("predictive", "few"), ("evictions x 1", "few"), ("growth x 1", "many"), ("gathered up to 0.7", "many")],
)
def test_growth_fears_sessions_that_will_not_fit(binding: str, expected: str) -> None:
    """One worker has less of its memory in use, and few large sessions. The sessions of the other can double."""
    few, many = worker("few", 2, 50_000, 100_000), worker("many", 40, 290_000, 600_000, batch=40)
    assert chosen(binding, few, many) == expected


def test_evictions_count_where_the_prompt_fits_nowhere() -> None:
    """The worker with the larger share in use would lose small sessions, which are soon computed again."""
    large, small = worker("large", 2, 95_000, 100_000), worker("small", 100, 97_000, 100_000)
    assert chosen("predictive", large, small, prompt_tokens=20_000) == "large"
    assert chosen("evictions x 1", large, small, prompt_tokens=20_000) == "small"
