"""What a request reloads, what that takes, and how it is counted."""

import pytest

from ampd.serving.kv_eviction import NextRounds
from ampd.types import Parallelism, Slo
from planner.simulator.kv_memory import KvMemory, KvStore, Reloads, SessionKv
from planner.simulator.request import SimulatedRequest
from tests.ampd.policies.routing_lab import PlainModel, SlowHost

TP1 = Parallelism(1)
PLAIN = PlainModel()


def reloads_of(device_tokens: int, belief: PlainModel = PLAIN, rounds: NextRounds | None = None) -> Reloads:
    """A worker with 160 tokens of session s in its store and some on its device."""
    memory = KvMemory(1000, 16, store=KvStore(1000, 16, lambda *_: 0))
    memory.reserve("s", 160)
    memory.settle("s", 160)
    SessionKv.cut(memory, "s", device_tokens)
    return Reloads(memory, PLAIN, belief, TP1, rounds or NextRounds(PLAIN, TP1), Slo(1e6, 0.1))


def request(cached_tokens: int = 160, read_tokens: int = 0, history_tokens: int = 192) -> SimulatedRequest:
    made = SimulatedRequest("s", 400, cached_tokens, 1, None, lambda *_: None, read_tokens)
    made.history_tokens = history_tokens
    return made


def test_what_is_not_on_the_device_is_reloaded_also_what_a_peer_gave() -> None:
    reloads, made = reloads_of(64), request(read_tokens=32)
    reloads.admit(made)
    assert (made.cached_tokens, made.read_tokens) == (160, 32)
    assert made.reload_s == reloads.reload_s == pytest.approx(PLAIN.reload_s(128, TP1))
    assert reloads.hit_tokens == {"device": 64, "store": 96, "peer": 32, "recomputed": 0}


def test_what_is_on_the_device_costs_nothing() -> None:
    reloads, made = reloads_of(160), request(history_tokens=160)
    reloads.admit(made)
    assert made.reload_s == 0
    assert reloads.hit_tokens == {"device": 160, "store": 0, "peer": 0, "recomputed": 0}


def test_what_is_stored_is_computed_where_that_is_believed_to_be_faster() -> None:
    reloads, made = reloads_of(64, SlowHost()), request(read_tokens=32)
    reloads.admit(made)
    assert (made.cached_tokens, made.read_tokens) == (64, 0)
    assert made.reload_s == reloads.reload_s == 0
    assert reloads.hit_tokens == {"device": 64, "store": 0, "peer": 0, "recomputed": 128}


def test_what_is_nowhere_is_computed_again() -> None:
    reloads, made = reloads_of(64), request(history_tokens=250)
    reloads.admit(made)
    assert reloads.hit_tokens == {"device": 64, "store": 96, "peer": 0, "recomputed": 80}


def test_a_round_is_learnt_from_and_a_slice_is_not() -> None:
    rounds = NextRounds(PLAIN, TP1)
    reloads = reloads_of(160, rounds=rounds)
    a_slice = SimulatedRequest("s", 200, 160, 0, None, lambda *_: None)
    reloads.admit(a_slice)
    assert rounds.surplus(160, "s") == 0
    reloads.admit(request())
    assert rounds.surplus(160, "s") == 160


def test_a_later_request_of_the_round_is_not_counted_again() -> None:
    reloads = reloads_of(0)
    reloads.admit(request(history_tokens=0))
    assert sum(reloads.hit_tokens.values()) == 0
    assert reloads.reload_s > 0


def test_a_read_is_preferred_where_it_is_faster_and_gives_more() -> None:
    class SlowNetwork(PlainModel):
        def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:  # noqa: ARG002
            return tokens / 100

    assert reloads_of(0).prefers_read("s", 400, 320, TP1)
    assert not reloads_of(0).prefers_read("s", 400, 160, TP1)
    assert not reloads_of(0, SlowNetwork()).prefers_read("s", 400, 320, TP1)
