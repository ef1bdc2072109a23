"""How much of a prompt workers hold for other sessions."""

import pytest

from ampd.keys import page_keys
from ampd.serving.shared_prefixes import PrefixUsers, prefix_key, published, reads_history, shared_tokens, with_shared
from ampd.types import PrefillTask, Role, Slo, WorkerView


def holding(worker_id: str, **prefixes: int) -> WorkerView:
    return WorkerView(worker_id, Role.DECODE, shared_prefixes=prefixes)


def test_a_worker_holds_the_longest_prefix_that_the_prompt_begins_with() -> None:
    workers = [holding("none"), holding("short", a=16), holding("both", a=16, b=48), holding("other", c=64)]
    assert published(workers) == {"a": 16, "b": 48, "c": 64}
    assert shared_tokens({"a": 16, "b": 48}, workers) == {"short": 16, "both": 48}
    assert shared_tokens({}, workers) == {}


def test_a_prompt_that_keeps_a_part_of_a_prefix_finds_that_part() -> None:
    assert shared_tokens({"a": 32}, [holding("w", a=48), holding("v", a=16)]) == {"w": 32, "v": 16}


def test_tenants_share_no_prefix() -> None:
    ids = list(range(16))
    assert len({prefix_key(page_keys(ids, 16, tenant=tenant)[0]) for tenant in ("", "acme", "other")}) == 3


def test_a_shared_prefix_is_history_as_far_as_it_is_longer_than_the_session_s_own() -> None:
    task = PrefillTask("t", "s", 32, 68, 0.0, Slo(1.0, 0.1))
    assert with_shared(task, 16) is task
    longer = with_shared(task, 64)
    assert (longer.hist_tokens, longer.incr_tokens) == (64, 36)
    # At least one token is computed, because its output is wanted.
    assert with_shared(task, 100).incr_tokens == 1


@pytest.mark.parametrize(("shared", "reads"), [(0, True), (31, True), (32, False), (48, False)])
def test_only_history_of_the_session_s_own_is_read(shared: int, reads: bool) -> None:
    assert reads_history(PrefillTask("t", "s", 32, 68, 0.0, Slo(1.0, 0.1)), shared) is reads


def test_a_prefix_is_shared_as_far_as_two_sessions_have_used_it() -> None:
    users = PrefixUsers()
    users.note("a", 32)
    users.note("a", 16)
    assert (users.is_shared, users.shared("a", 32), users.shared("b", 48)) == (False, 0, 32)
    users.note("b", 64)
    assert (users.is_shared, users.shared("a", 48), users.shared("c", 80)) == (True, 48, 64)
    # The session that used least is forgotten, because no other session shares more with it than with the others.
    users.note("c", 48)
    assert (users.shared("b", 80), users.shared("c", 80)) == (48, 64)
