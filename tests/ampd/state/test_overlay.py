"""Small changes laid over a worker's last view: the same picture whatever the order, and nothing counted twice."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ampd.state.known_worker import merge
from ampd.types import PrefillTask, Role, Slo, WorkerView

names = st.sampled_from("abcdef")
some = st.lists(names, unique=True)
sessions = st.dictionaries(st.sampled_from(["s", "t", "u"]), st.integers(1, 9))


def tasks(ids: list[str]) -> tuple[PrefillTask, ...]:
    return tuple(PrefillTask(name, name, 0, 1, 0.0, Slo(1.0, 0.1)) for name in ids)


def view_of(ids: list[str], held: dict[str, int]) -> WorkerView:
    return WorkerView("w", Role.PREFILL, queue=tasks(ids), held_tokens=held, decode_batch=3)


@given(some, st.lists(names), some, sessions)
def test_each_prefill_that_is_not_done_is_there_once(
    queued: list[str], entered: list[str], done: list[str], held: dict[str, int]
) -> None:
    view = view_of(queued, held)
    merged = merge(view, tasks(list(dict.fromkeys(entered))), set(done))
    present = Counter(task.task_id for task in merged.queue)
    assert set(present) == (set(queued) | set(entered)) - set(done)
    assert set(present.values()) <= {1}
    # The worker's own order comes first, because it knows its queue.
    own = [name for name in queued if name not in done]
    assert [task.task_id for task in merged.queue][: len(own)] == own
    assert (merged.held_tokens, merged.decode_batch) == (held, 3)
    assert merge(merged, tasks(list(dict.fromkeys(entered))), set(done)) == merged
    assert (view.queue, view.held_tokens) == (tasks(queued), held), "the published view stays as it is"
