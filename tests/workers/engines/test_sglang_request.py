"""Requests in SGLang's terms: guides of the output."""

from __future__ import annotations

from typing import Any

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from xgrammar.testing import _is_grammar_accept_string as accepts

from workers.engines.base import EngineError, EngineRequest
from workers.engines.sglang_request import MOST_GUIDE_CHARS, sampling_params


def parameters(**guided: Any) -> dict[str, Any]:
    request = {"sampling_options": {"guided_decoding": guided}}
    return sampling_params(EngineRequest("r", "s", [1, 2], 4, request=request))


def sampled(is_deterministic: bool, **options: Any) -> dict[str, Any]:
    request = EngineRequest("r", "s", [1, 2], 4, request={"sampling_options": options})
    return sampling_params(request, is_deterministic=is_deterministic)


def test_min_p_is_refused_where_sglang_would_end() -> None:
    assert sampled(False, temperature=1.0, min_p=0.1)["min_p"] == 0.1
    with pytest.raises(EngineError, match="min_p") as refused:
        sampled(True, temperature=1.0, min_p=0.1)
    assert refused.value.status == 400
    assert "min_p" not in sampled(True, temperature=0.0, min_p=0.1, seed=7)
    assert sampled(True, temperature=1.0, min_p=0.0, seed=7)["sampling_seed"] == 7


def test_a_grammar_decides_when_its_output_may_end() -> None:
    """At its end only a stop token is left. `min_new_tokens` forbids it, and `ignore_eos` goes on behind it."""
    stops = {"min_tokens": 20, "stop_token_ids": [7], "ignore_eos": True}
    guided = {"sampling_options": {"guided_decoding": {"choice": ["a", "b"]}}, "stop_conditions": stops}
    assert (
        not {"min_new_tokens", "ignore_eos"}
        & sampling_params(EngineRequest("r", "s", [1, 2], 40, request=guided)).keys()
    )
    free = sampling_params(EngineRequest("r", "s", [1, 2], 40, request={"stop_conditions": stops}))
    assert (free["min_new_tokens"], free["ignore_eos"]) == (20, True)


GUIDES: dict[str, tuple[str, Any]] = {
    "json": ("json_schema", {"description": "x" * 200_000}),
    "json as text": ("json_schema", '"' + "x" * 200_000 + '"'),
    "structural_tag": ("structural_tag", {"type": "x" * 200_000}),
    "regex": ("regex", "a" * 20_000),
    "choice": ("ebnf", ["yes"] * 5000),
    "grammar": ("ebnf", "root ::= " + "a" * 20_000),
}


@pytest.mark.parametrize("name", list(GUIDES))
def test_a_guide_that_is_too_long_is_refused(name: str) -> None:
    kind, guide = GUIDES[name]
    with pytest.raises(EngineError, match=rf"the guide of the output \({kind}\) has \d+ characters") as refused:
        parameters(**{name.split()[0]: guide})
    assert refused.value.status == 400


def test_the_longest_guide_is_served() -> None:
    assert parameters(regex="a" * MOST_GUIDE_CHARS["regex"])["regex"]
    tools = {"anyOf": [{"type": "object", "description": "x" * 1000} for _ in range(100)]}
    assert parameters(json=tools)["json_schema"]


ODD = st.text(
    st.sampled_from("ab\"'\\\n\r\t\x00\x08\x0c\x1b\x7f\x85\u00e9\u2028\ufeff\uffff\U0001f600\U0010ffff/un|[]()"),
    max_size=6,
)


@given(st.lists(ODD | st.text(max_size=6), min_size=1, max_size=3), st.text(max_size=3))
def test_a_choice_is_quoted_so_that_its_grammar_accepts_exactly_its_texts(texts: list[str], other: str) -> None:
    grammar = xgrammar.Grammar.from_ebnf(parameters(choice=texts)["ebnf"])
    for text in texts:
        for probe in (text, text[:-1], text + other, other, text.replace("\\", "")):
            assert accepts(grammar, probe) == (probe in texts)
