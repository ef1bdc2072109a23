"""What is done of the changes that a pools policy wants."""

import math
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.policies.base import PoolsSituation, RoleChange
from ampd.serving.roles import DueChanges, RoleReview, due_changes
from ampd.types import Role, Slo, WorkerView

MODEL = load_performance_model("tiny-cpu")
SLO = Slo(1.0, 0.1)


class WantsNothing:
    """Wants no change, and keeps what it is asked."""

    is_idle = False

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        self.seen = situation
        return ()


def turn(worker_id: str, role: Role, label: str = "") -> RoleChange:
    return RoleChange(worker_id, role, "test", label)


def due(workers: dict[str, Role], *changes: RoleChange) -> DueChanges:
    return due_changes([WorkerView(name, role) for name, role in workers.items()], changes)


def names(found: DueChanges) -> tuple[list[str], list[str]]:
    return [change.change.worker_id for change in found.changes], [change.change.worker_id for change in found.kept]


PAIR = {"d1": Role.DECODE, "d2": Role.DECODE, "p1": Role.PREFILL}


def test_the_policy_sees_the_situation() -> None:
    views, rng, policy = [WorkerView("d", Role.DECODE)], random.Random(1), WantsNothing()
    assert RoleReview(policy, MODEL, SLO, rng).wanted(views, 5.0, -math.inf) == ()
    seen = policy.seen
    assert (seen.workers, seen.slo, seen.model, seen.now_s, seen.changed_s) == (views, SLO, MODEL, 5.0, -math.inf)
    assert seen.rng is rng


def test_a_role_that_the_worker_has_is_no_change_but_another_lane_is() -> None:
    same, labelled = turn("p1", Role.PREFILL), turn("p1", Role.PREFILL, "long")
    found = due(PAIR, same, labelled, labelled)
    assert [change.change for change in found.changes] == [labelled]
    assert found.changes[0].before == WorkerView("p1", Role.PREFILL)


def test_an_unknown_worker_is_skipped() -> None:
    assert names(due(PAIR, turn("gone", Role.PREFILL), turn("d1", Role.PREFILL))) == (["d1"], [])


def test_the_last_decode_worker_stays() -> None:
    assert names(due(PAIR, turn("d1", Role.PREFILL), turn("d2", Role.PREFILL))) == (["d1"], ["d2"])
    swap = turn("p1", Role.DECODE), turn("d1", Role.PREFILL), turn("d2", Role.PREFILL)
    assert names(due(PAIR, *swap)) == (["p1", "d1", "d2"], [])


def test_a_mixed_worker_owns_sessions_and_so_lets_the_last_decode_worker_go() -> None:
    assert [role for role in Role if role.owns_sessions] == [Role.DECODE, Role.MIXED]
    assert [role for role in Role if role.takes_prefills] == [Role.PREFILL, Role.MIXED]
    alone = {"d1": Role.DECODE, "p1": Role.PREFILL}
    assert names(due(alone, turn("p1", Role.MIXED), turn("d1", Role.PREFILL))) == (["p1", "d1"], [])
    assert names(due(alone, turn("d1", Role.MIXED), turn("d1", Role.PREFILL))) == (["d1"], ["d1"])
    (kept,) = due({"m1": Role.MIXED}, turn("m1", Role.PREFILL)).kept
    assert kept.before.role is Role.MIXED


def test_a_worker_that_changes_twice_is_seen_as_its_first_change_left_it() -> None:
    found = due(PAIR, turn("d1", Role.PREFILL, "long"), turn("d1", Role.DECODE))
    assert [(change.before.role, change.before.label) for change in found.changes] == [
        (Role.DECODE, ""),
        (Role.PREFILL, "long"),
    ]


@given(
    roles=st.lists(st.sampled_from(Role), min_size=1, max_size=4),
    wanted=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(Role), st.sampled_from(["", "a"])), max_size=8),
)
def test_a_worker_that_owns_sessions_is_always_left(roles: list[Role], wanted: list[tuple[int, Role, str]]) -> None:
    workers = {str(number): role for number, role in enumerate(roles)}
    found = due(workers, *(turn(str(number), role, label) for number, role, label in wanted))
    assert len(found.changes) + len(found.kept) <= len(wanted)
    had_one = any(role.owns_sessions for role in workers.values())
    for change in found.changes:
        workers[change.change.worker_id] = change.change.role
        assert not had_one or any(role.owns_sessions for role in workers.values())
