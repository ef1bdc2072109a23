"""Layouts on which rivals and our own parts are tried."""

from ampd.policies.registry import create_named
from ampd.types import Role
from benchmarks.best_layouts.entries import (
    Entry,
    all_settings,
    our_parts,
    ours,
    planned_settings,
    rivals,
    settings_named,
    splits,
)
from benchmarks.policies.contestants import OURS_STATIC
from benchmarks.policies.settings import Setting

FOUR = Setting("qwen3-32b", "h20", "toolbench", "2xTP2", "2xTP2", 0.35, 0.04)


def test_splits_keep_workers_and_degree() -> None:
    found = [(split.prefill, split.decode) for split in splits(FOUR)]
    assert found == [("2xTP2", "2xTP2"), ("1xTP2", "3xTP2"), ("3xTP2", "1xTP2")]


def test_splits_of_unequal_workers_are_all_assignments_of_the_same_workers() -> None:
    setting = Setting("llama-3.1-8b", "l40s", "tau-bench-airline", "2xTP1", "1xTP2+1xTP4", 0.5, 0.05)
    found = [(split.prefill, split.decode) for split in splits(setting)]
    assert found[0] == ("2xTP1", "1xTP2+1xTP4")
    assert len(found) == len(set(found)) == 3 * 2 * 2 - 2
    assert ("1xTP1+1xTP4", "1xTP1+1xTP2") in found
    assert all(split.gpus == 8 for split in splits(setting))
    assert Entry(OURS_STATIC, setting).label == "ours with fixed roles 2xTP1 + 1xTP2+1xTP4"


def test_planned_settings_are_run_only_if_they_are_named() -> None:
    planned = planned_settings()
    assert settings_named(None) == all_settings()
    assert settings_named(f"{planned[0].name} l40s") == planned[:1]
    assert not {*planned} & {*all_settings()}


def test_every_layout_of_our_parts_is_tried_with_as_many_gpus() -> None:
    labels = {entry.label for entry in our_parts(FOUR)}
    assert {f"ours with fixed roles {split}" for split in ("1+3", "2+2", "3+1")} <= labels
    assert {f"ours, mixed workers {split}" for split in ("1+3", "2+2", "3+1")} <= labels
    assert {"co-located ours", "co-located ours, least-kv"} <= labels
    for entry in our_parts(FOUR):
        assert entry.contestant.cluster(entry.setting.cluster()).gpus == FOUR.gpus


def test_ours_starts_from_the_even_split_in_every_setting() -> None:
    for setting in all_settings():
        assert setting.prefill == setting.decode
        assert {entry.setting for entry in ours(setting)} == {setting}


def test_rivals_are_tried_on_every_split_and_co_located() -> None:
    labels = [entry.label for entry in rivals(FOUR)]
    assert len(labels) == len(set(labels))
    assert {f"deflection {split}" for split in ("1+3", "2+2", "3+1")} <= set(labels)
    assert {"co-located chunked", "co-located mixed passes"} <= set(labels)
    assert not any("ours" in label for label in labels)


def test_rivals_that_prefill_where_rounds_decode_are_tried_in_chunks_too() -> None:
    tried = {entry.label: entry.contestant for entry in rivals(FOUR)}
    chunked = ["threshold chunked", "arrow chunked", "taichi 2048/256", "taichi 512/96"]
    assert {f"{label} {split}" for label in chunked for split in ("1+3", "2+2", "3+1")} <= set(tried)
    assert not any(label.startswith(("always-remote", "kairos")) and "chunked" in label for label in tried)


def test_the_chunk_sizes_of_taichi_are_those_that_its_routing_expects() -> None:
    found = [entry.contestant for entry in rivals(FOUR) if entry.label.startswith("taichi")]
    for contestant in found:
        routing = create_named("routing", contestant.routing)
        slicing = create_named("slicing", contestant.slicing)
        for role in Role:
            assert routing.chunk_tokens(role) == slicing.chunk_tokens(role)
    assert found
