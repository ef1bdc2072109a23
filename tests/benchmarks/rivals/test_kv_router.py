"""Dynamo's KV router as a binding: tokens to prefill plus tokens that decode."""

import random
from dataclasses import replace

from ampd.policies.registry import create
from ampd.types import WorkerView
from tests.ampd.policies import situations
from tests.ampd.policies.routing_lab import PLAIN, decode, round_of


def bound(*workers: WorkerView, weight: float = 1.0, **shared_tokens: int) -> str:
    binding = create("binding", "kv-router", overlap_weight=weight)
    return situations.bind(binding, round_of(0, 1000), workers, PLAIN, 0.0, random.Random(1), shared_tokens)


def test_the_fewest_tokens_to_prefill_and_to_decode_win() -> None:
    busy, free = decode(batch=1, name="busy"), decode(name="free")  # 1000 tokens decode at the first
    assert bound(busy, free) == "free"
    assert bound(busy, decode(1200, name="queued")) == "busy"
    assert bound(busy, free, busy=992) == "free"
    assert bound(busy, free, weight=2.0, busy=992) == "busy"
    assert bound(busy, decode(100, name="queued"), busy=960) == "busy"


def test_a_worker_without_room_comes_last() -> None:
    full = replace(decode(name="full"), kv_used_tokens=9500, kv_capacity_tokens=10_000)
    assert bound(full, decode(batch=5, name="busy")) == "busy"
    assert bound(full, decode(batch=5, name="busy"), full=600) == "full"
