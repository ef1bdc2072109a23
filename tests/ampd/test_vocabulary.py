from array import array
from typing import Any

import pytest

from ampd.sampling_limits import known_tokens, unknown_token, vocabulary_tokens

SIZE = 1000


@pytest.mark.parametrize(
    ("token_ids", "request_", "words"),
    [
        (
            [5, 6, 4_000_000_000],
            {},
            "token id 4000000000 in the prompt is not in this model's vocabulary of 1000 tokens",
        ),
        ([1000], {}, "token id 1000 in the prompt"),
        ([1], {"stop_conditions": {"stop_token_ids": [3, 999_999_999]}}, "token id 999999999 in stop_token_ids"),
        ([1], {"stop_conditions": {"stop_token_ids_hidden": [1000], "min_tokens": 2}}, "1000 in stop_token_ids_hidden"),
        ([1], {"sampling_options": {"logit_bias": {"1000": 1.0}}}, "token id 1000 in logit_bias"),
        ([1], {"sampling_options": {"logit_bias": {"one": 1.0}}}, "logit_bias must map token ids"),
    ],
)
def test_a_token_id_outside_the_vocabulary_is_named(token_ids: list[int], request_: dict[str, Any], words: str) -> None:
    assert words in (unknown_token(array("I", token_ids), request_, SIZE) or "")


def test_everything_inside_the_vocabulary_is_fine() -> None:
    request = {
        "stop_conditions": {
            "stop_token_ids": [0, 999],
            "stop_token_ids_hidden": [1002],
            "stop_token_ids_visible": None,
        },
        "sampling_options": {"logit_bias": {"999": -1.0}},
        "eos_token_ids": [1002],
    }
    assert unknown_token(array("I", [0, 999]), request, SIZE) is None


def test_stop_tokens_that_cannot_be_sampled_are_left_out() -> None:
    assert known_tokens({7, -1, 1000, 999}, SIZE) == [7, 999]
    assert known_tokens({7, 1000}, None) == [7, 1000]


def test_the_embedding_of_a_nested_configuration_counts() -> None:
    assert vocabulary_tokens({"vocab_size": 10, "text_config": {"vocab_size": 20}}) == 20
    assert vocabulary_tokens({"vocab_size": 10}) == 10
    assert vocabulary_tokens({}) is None
