"""Our binding: room first, then time and memory as shares."""

import random
from collections import Counter
from dataclasses import replace

from ampd.policies.registry import create
from ampd.types import WorkerView
from tests.ampd.policies import situations
from tests.ampd.policies.routing_lab import PLAIN, decode, round_of

BINDING = create("binding", "predictive")


def worker(name: str, batch: int = 0, used: int = 0, capacity: int = 10_000) -> WorkerView:
    return replace(decode(batch=batch), worker_id=name, kv_used_tokens=used, kv_capacity_tokens=capacity)


def bound(*workers: WorkerView, seed: int = 0, tokens: int = 1000, **shared_tokens: int) -> str:
    rng = random.Random(seed)
    return situations.bind(BINDING, round_of(0, tokens), workers, PLAIN, 0.0, rng, shared_tokens)


def test_room_comes_before_load() -> None:
    assert bound(worker("full", used=9500), worker("busy", batch=30)) == "busy"
    assert bound(worker("full", used=9500), worker("fuller", used=9900)) == "full"


def test_the_smaller_batch_takes_it() -> None:
    assert bound(worker("a", batch=20), worker("b", batch=3)) == "b"


def test_a_queue_counts_as_time() -> None:
    queued = replace(decode(800), worker_id="queued", kv_capacity_tokens=10_000)
    assert bound(queued, worker("free")) == "free"


def test_the_store_counts_where_there_is_one() -> None:
    stored = replace(worker("stored", used=9500), store_used_tokens=4000, store_capacity_tokens=40_000)
    assert bound(worker("a", used=4000), stored) == "stored"
    assert bound(worker("a", used=4000), replace(stored, store_used_tokens=30_000)) == "a"


def test_memory_counts_by_share_and_not_by_tokens() -> None:
    assert bound(worker("small", used=4000, capacity=8000), worker("large", used=6000, capacity=80_000)) == "large"


def test_equals_share() -> None:
    counts = Counter(bound(worker("a"), worker("b"), seed=seed) for seed in range(400))
    assert min(counts["a"], counts["b"]) > 150


def test_the_worker_that_saves_time_by_a_shared_prefix_takes_it() -> None:
    # 20 sequences take half of the ITL target, which 500 ms of a target of 1 s make up for, and 300 ms do not.
    busy, free = worker("busy", batch=20, capacity=0), worker("free", capacity=0)
    assert bound(busy, free) == "free"
    assert bound(busy, free, busy=600) == "busy"
    assert bound(busy, free, busy=300) == "free"
    assert bound(worker("full", used=9500), worker("fuller", used=9200), full=600) == "full"
