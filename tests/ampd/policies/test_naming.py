import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.errors import UserError
from ampd.policies.base import parse_named, split_names

names = st.from_regex(r"[A-Za-z0-9_-]+", fullmatch=True)
values = st.integers() | st.floats(allow_nan=False) | st.booleans() | st.from_regex(r"[a-z]{1,8}", fullmatch=True)
policies = st.tuples(names, st.dictionaries(names, values, max_size=3))


def written(name: str, parameters: dict[str, Any]) -> str:
    parts = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in parameters.items()]
    return f"{name}({', '.join(parts)})" if parts else name


@given(st.lists(policies, min_size=1, max_size=3))
def test_a_list_of_policies_is_read_as_it_was_written(wanted: list[tuple[str, dict[str, Any]]]) -> None:
    # Words that are JSON are values: `true`, `null`.
    texts = [written(*policy) for policy in wanted]
    assert split_names(" , ".join(texts)) == texts
    for text, (name, parameters) in zip(texts, wanted, strict=True):
        expected = {key: _meant(value) for key, value in parameters.items()}
        assert parse_named(f"  {text} ") == (name, expected)


def _meant(value: Any) -> Any:
    return {"true": True, "false": False, "null": None}.get(value, value) if isinstance(value, str) else value


@pytest.mark.parametrize("text", ["", "a b", "a(", "a)x", "a(x=1", "(x=1)", "a(x=1) b"])
def test_another_form_is_refused_with_what_was_given(text: str) -> None:
    with pytest.raises(UserError, match=r"a policy is written as NAME or NAME\(parameter=value, \.\.\.\)") as refusal:
        parse_named(text)
    assert repr(text) in str(refusal.value)


def test_a_parameter_needs_a_name() -> None:
    with pytest.raises(UserError, match="policy a: give parameters as name=value"):
        parse_named("a(5)")
