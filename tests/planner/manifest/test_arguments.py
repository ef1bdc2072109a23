"""Flags and variables in a manifest: each is set once, in its place, and nothing else changes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.manifest.planned import with_environment, with_flags

NAMES = "abcdef"
names = st.lists(st.sampled_from(NAMES), unique=True)
values = st.dictionaries(st.sampled_from(NAMES), st.one_of(st.none(), st.sampled_from(["", "x=y", "2"])))


@settings(max_examples=30)
@given(names, values)
def test_flags_are_set_in_their_place_or_at_the_end(before: list[str], wanted: dict[str, str | None]) -> None:
    found = with_flags([f"--{name}=old" for name in before], {f"--{name}": value for name, value in wanted.items()})
    kept = [name for name in before if wanted.get(name, "kept") is not None]
    new = [name for name, value in wanted.items() if value is not None and name not in before]
    assert found == [f"--{name}={wanted.get(name, 'old')}" for name in [*kept, *new]]


@settings(max_examples=30)
@given(names, values)
def test_variables_are_set_in_their_place_or_at_the_end(before: list[str], drawn: dict[str, str | None]) -> None:
    wanted = {name: value or "" for name, value in drawn.items()}
    entries = [{"name": name, "valueFrom": {"secretKeyRef": name}} for name in before]
    found = with_environment(entries, wanted)
    assert [entry["name"] for entry in found] == [*before, *(name for name in wanted if name not in before)]
    for entry in found:
        name = entry["name"]
        assert entry == ({"name": name, "value": wanted[name]} if name in wanted else entries[before.index(name)])
