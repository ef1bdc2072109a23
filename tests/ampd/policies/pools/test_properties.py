"""What no pools policy ever does, whatever it sees."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.policies.base import PoolsPolicy
from ampd.policies.laps import LANES
from ampd.policies.registry import POOLS, create
from ampd.types import Parallelism, Role, WorkerView
from tests.ampd.policies import situations
from tests.ampd.policies.pools_lab import (
    MODEL,
    NEVER,
    OVERLOADED,
    SLO,
    decode,
    lanes,
    loads,
)


def test_the_static_pools_stay() -> None:
    static = create("pools", "static")
    assert (
        list(
            situations.change(
                static, (OVERLOADED, decode("d1"), decode("d2")), SLO, MODEL, 0.0, NEVER, random.Random(0)
            )
        )
        == []
    )


@pytest.mark.parametrize("name", POOLS.names())
@pytest.mark.parametrize("prefills", [0, 1, 2, 4])
@pytest.mark.parametrize("decodes", [1, 3])
def test_an_idle_balanced_cluster_is_left_alone(name: str, prefills: int, decodes: int) -> None:
    policy = create("pools", name)
    idle = lanes("short", "long", "short", "long")[:prefills]
    if name != "laps" or prefills < 2:
        idle = [replace(worker, label="") for worker in idle]
    workers = [*idle, *(decode(f"d{number}") for number in range(decodes))]
    assert list(situations.change(policy, workers, SLO, MODEL, 0.0, NEVER, random.Random(0))) == []


@st.composite
def histories(draw: st.DrawFn) -> tuple[PoolsPolicy, list[tuple[float, list[WorkerView]]]]:
    """A policy, and a cluster as it looks from moment to moment, under any load and with the roles of the start."""
    policy = create("pools", draw(st.sampled_from(["arrow", "laps"])), cooldown_s=draw(st.floats(0, 3)))
    sizes = draw(st.lists(st.sampled_from([0, 50_000, 90_000]), min_size=2, max_size=6))
    members = [
        WorkerView(f"w{number}", Role.PREFILL, Parallelism(draw(st.sampled_from([1, 4]))), kv_capacity_tokens=size)
        for number, size in enumerate(sizes)
    ]
    cut = draw(st.integers(0, len(members) - 1))
    members[cut:] = [replace(member, role=Role.DECODE) for member in members[cut:]]
    now_s, moments = 0.0, []
    for _ in range(draw(st.integers(1, 8))):
        now_s += draw(st.floats(0.01, 2))
        moments.append((now_s, [draw(loads(member)) for member in members]))
    return policy, moments


@pytest.mark.slow
@given(histories(), st.integers(0, 5))
def test_no_role_is_ever_emptied_no_two_flips_fall_within_a_cooldown_and_every_session_still_fits_somewhere(
    history: tuple[PoolsPolicy, list[tuple[float, list[WorkerView]]]], seed: int
) -> None:
    policy, moments = history
    rng = random.Random(seed)
    roles = {member.worker_id: member.role for member in moments[0][1]}
    lanes_of = dict.fromkeys(roles, "")
    changed_s, flips = NEVER, []
    had = set(roles.values())
    for now_s, members in moments:
        seen = [replace(member, role=roles[member.worker_id], label=lanes_of[member.worker_id]) for member in members]
        changes = situations.change(policy, seen, SLO, MODEL, now_s, changed_s, rng)
        for change in changes:
            assert (change.role, change.label) != (roles[change.worker_id], lanes_of[change.worker_id])
            if change.role is not roles[change.worker_id] or lanes_of[change.worker_id]:
                flips.append(now_s)
            roles[change.worker_id], lanes_of[change.worker_id] = change.role, change.label
        changed_s = now_s if changes else changed_s
        assert had <= set(roles.values())
        assert _largest([replace(member, role=roles[member.worker_id]) for member in seen]) >= _largest(seen)
        counts = Counter(lane for lane in lanes_of.values() if lane)
        assert not counts or set(counts) == set(LANES)
    for earlier, later in pairwise(flips):
        assert later - earlier >= policy.cooldown_s  # type: ignore[attr-defined]
        assert later > earlier, "one at a time"


def _largest(members: list[WorkerView]) -> float:
    return max(member.kv_capacity_tokens or math.inf for member in members if member.role is Role.DECODE)
