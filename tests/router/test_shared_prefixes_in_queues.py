"""What a worker holds of a prompt for other sessions counts while its prefill waits: in its place."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.keys import page_keys
from ampd.perf.presets import load_performance_model
from ampd.policies import defaults
from ampd.policies.base import OrderingSituation, Run
from ampd.policies.registry import create
from ampd.serving.shared_prefixes import prefix_key, with_shared
from ampd.types import Parallelism, PrefillTask, Role, Slo
from ampd.wire import decode_task
from tests.router.replica_lab import Replica, cluster, worker

MODEL, H20 = load_performance_model("tiny-cpu"), load_performance_model("qwen3-32b-h20")
ALONE = Parallelism()
SYSTEM, OTHER = [7] * 768, [9] * 768
OWN = [11] * 48
SHARED = {prefix_key(page_keys(SYSTEM, 16, tenant="")[-1]): len(SYSTEM)}


def waiting(name: str, hist_tokens: int, context_tokens: int, slo: Slo, arrival_s: float) -> PrefillTask:
    return PrefillTask(name, name, hist_tokens, context_tokens - hist_tokens, arrival_s, slo)


def prefill_s(task: PrefillTask) -> float:
    return MODEL.prefill_s(task.hist_tokens, task.incr_tokens, ALONE)


@pytest.mark.parametrize(("role", "endpoint"), [(Role.PREFILL, "prefill"), (Role.DECODE, "generate")])
@pytest.mark.parametrize("ordering", ["shortest-prefill-first", defaults.ORDERING])
async def test_a_prompt_that_a_worker_holds_for_others_overtakes_one_of_equal_length(
    role: Role, endpoint: str, ordering: str
) -> None:
    """The tasks are those that the coordinator gives to the worker, whether that owns the sessions or not."""
    holder = worker("w", role, shared_prefixes=SHARED)
    state = await cluster(holder, *([worker("d")] if role is Role.PREFILL else []))
    tasks = []
    async with Replica(state) as replica:
        for name, prompt in (("stranger", OTHER), ("kin", SYSTEM)):
            await replica.round(name, token_ids=[*prompt, *OWN])
        calls = [
            request for asked, worker_id, request in replica.workers.calls if (asked, worker_id) == (endpoint, "w")
        ]
        tasks = [decode_task(request["task"], 0.0) for request in calls]
    stranger, kin = tasks
    assert (stranger.hist_tokens, stranger.incr_tokens) == (0, 816)
    assert (kin.hist_tokens, kin.incr_tokens) == (768, 48)
    # Only the prompt of which 48 tokens are missing can be on time. It came second.
    slo = Slo((prefill_s(stranger) + prefill_s(kin)) / 2, 1.0)
    queue = [waiting(task.session_id, task.hist_tokens, 816, slo, 0.0) for task in tasks]
    situation = OrderingSituation(model=MODEL, now_s=0.0, queue=queue, parallelism=ALONE, rng=random.Random(1))
    chosen = create("ordering", ordering).pick(situation)
    assert isinstance(chosen, Run)
    assert chosen.index == 1


@given(context_tokens=st.integers(64, 4000), held=st.floats(0.0, 1.0), shared=st.floats(0.0, 1.0))
def test_shared_tokens_never_make_a_prefill_seem_longer(context_tokens: int, held: float, shared: float) -> None:
    slo = Slo(1.0, 0.1)
    task = waiting("t", int(held * (context_tokens - 1)), context_tokens, slo, 0.0)
    with_prefix = with_shared(task, int(shared * context_tokens))
    assert with_prefix.context_tokens == context_tokens
    assert prefill_s(with_prefix) <= prefill_s(task) + 1e-12
    if shared * context_tokens >= task.hist_tokens + 16:
        assert with_prefix.incr_tokens < task.incr_tokens
