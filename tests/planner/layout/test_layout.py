"""A layout: its GPUs, its cluster and its text name the same replicas."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.layout.layout import Layout, layout_label, replicas_of
from planner.simulator.options import parse_groups

from .lab import CASE

counts = st.dictionaries(st.sampled_from([1, 2, 4, 8]), st.integers(0, 5)).filter(lambda found: any(found.values()))


@settings(max_examples=20)
@given(counts, counts, st.just({}) | counts)
def test_gpus_cluster_and_text_agree(prefill: dict[int, int], decode: dict[int, int], mixed: dict[int, int]) -> None:
    layout = Layout(replicas_of(prefill), replicas_of(decode), replicas_of(mixed))
    memory = {degree: 1000 * degree for degree in (1, 2, 4, 8)}
    cluster = replace(CASE, kv_capacity_tokens=memory, kv_store_tokens={4: 9000}).cluster_of(layout)
    assert layout.gpus == cluster.gpus == layout.as_dict()["gpus"]
    assert cluster.max_context_tokens == CASE.model.profile.max_context_tokens
    assert str(layout) == layout_label(layout.as_dict()) == str(cluster)
    assert ("mixed" in layout.as_dict()) == bool(mixed)
    for counted, groups in ((prefill, cluster.prefill), (decode, cluster.decode), (mixed, cluster.mixed)):
        if not counted:
            continue
        assert {group.parallelism.tp: group.replicas for group in groups} == {n: c for n, c in counted.items() if c}
        assert all(group.kv_capacity_tokens == 1000 * group.parallelism.tp for group in groups)
        assert all(group.kv_store_tokens == (9000 if group.parallelism.tp == 4 else 0) for group in groups)
        text = ",".join(map(str, groups))
        assert parse_groups(text, "--x") == tuple((group.replicas, group.parallelism) for group in groups)
