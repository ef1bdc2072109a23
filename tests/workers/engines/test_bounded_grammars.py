"""Which grammars have bounded costs, and what becomes of one that meets a limit. `test_sglang` has the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ampd.tiny_model import tiny_model_path
from workers.engines.sglang_request import TOO_AMBIGUOUS

pytestmark = pytest.mark.slow

VOCABULARY, END, A, Z = 768, 2, 67, 92
EXPLODING = "(((a{1,100}){1,100}){1,100}){60,100}"
GROWING = 'root ::= part{200,300}\npart ::= part part part | "a" | part "a" | "a" part'


@pytest.fixture(scope="module")
def backend() -> Any:
    pytest.importorskip("sglang")
    from transformers import PreTrainedTokenizerFast

    from workers.engines.bounded_grammars import BoundedBackend

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tiny_model_path() / "tokenizer.json"))
    return BoundedBackend(tokenizer, VOCABULARY, [END])


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "pattern": "a*"}, True),
        ({"type": "object", "properties": {"x": {"anyOf": [{"patternProperties": {"a*": {}}}]}}}, True),
        ({"type": "structural_tag", "format": {"type": "sequence", "elements": [{"type": "grammar"}]}}, True),
        ({"type": "structural_tag", "format": {"type": "regex"}}, True),
        ({"type": "object", "properties": {"x": {"enum": ["pattern", "regex"]}}}, False),
        ("$$ANY$$", False),
    ],
)
@pytest.mark.usefixtures("backend")
def test_patterns_are_found_wherever_they_are(schema: Any, expected: bool) -> None:
    from workers.engines.bounded_grammars import has_pattern

    assert has_pattern(schema if isinstance(schema, str) else json.dumps(schema)) is expected


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": "a"}})),
        ("regex", "("),
        ("ebnf", "root ::= missing"),
        ("json", json.dumps({"type": "string", "pattern": "("})),
    ],
)
def test_some_grammars_are_refused_before_the_first_token(backend: Any, kind: str, text: str) -> None:
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    grammar = getattr(backend, f"dispatch_{kind}")(text)
    assert isinstance(grammar, InvalidGrammarObject)
    assert grammar.error_message
    assert "\n" not in grammar.error_message


@pytest.mark.parametrize(("kind", "text"), [("regex", EXPLODING), ("ebnf", GROWING)])
def test_a_grammar_at_its_limit_refuses_the_token_and_masks_nothing(backend: Any, kind: str, text: str) -> None:
    grammar = getattr(backend, f"dispatch_{kind}")(text).copy()
    mask = grammar.allocate_vocab_mask(VOCABULARY, 2, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    assert not (mask[0] == -1).all()
    for _ in range(300):
        try:
            grammar.accept_token(A)
        except ValueError as error:
            assert str(error) == TOO_AMBIGUOUS  # noqa: PT017
            break
    else:
        pytest.fail("it has no limit")
    grammar.fill_vocab_mask(mask, 0)
    assert (mask == -1).all()
    with pytest.raises(ValueError, match=TOO_AMBIGUOUS):
        grammar.accept_token(END)  # it must not look like the end of a complete output


def test_a_token_that_does_not_fit_is_not_a_limit(backend: Any) -> None:
    grammar = backend.dispatch_regex("abc")
    with pytest.raises(ValueError, match="doesn't satisfy"):
        grammar.accept_token(Z)


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (r'root ::= "\u0041\x42"', r'root ::= "\x41\x42"'),
        (r'root ::= "\u00e9\u0001"', 'root ::= "é\\x01"'),
        (r'root ::= "\\u0041"', r'root ::= "\\u0041"'),
    ],
)
@pytest.mark.usefixtures("backend")
def test_escapes_that_llguidance_misreads_are_written_otherwise(grammar: str, expected: str) -> None:
    from workers.engines.bounded_grammars import without_u_escapes

    assert without_u_escapes(grammar) == expected


def test_a_mask_is_applied_without_compiling_anything(backend: Any) -> None:
    """A compilation takes seconds, in which all rounds of the engine wait."""
    import torch

    grammar = backend.dispatch_regex("a+").copy()
    mask = grammar.allocate_vocab_mask(VOCABULARY, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    logits = torch.zeros(1, VOCABULARY)
    with torch.compiler.set_stance("fail_on_recompile"):
        grammar.apply_vocab_mask(logits, mask)
    assert torch.isfinite(logits[0, A])
    assert torch.isneginf(logits[0, [Z, END]]).all()
