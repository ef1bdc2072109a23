"""Options that no engine follows are refused, and their neutral values are not."""

from typing import Any

import pytest

from ampd.types import Slo
from router.request import parse_round, unserved_option
from router.round_errors import RoundRefusedError
from router.targets import TargetLimits


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sampling_options": {"best_of": 2}}, "best_of"),
        ({"sampling_options": {"best_of": 3, "n": 2}}, "best_of"),
        ({"sampling_options": {"length_penalty": 2.0}}, "length_penalty"),
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"sampling_options": {"logit_bias": {"70": 100}}}, "logit_bias"),
        ({"extra_args": {"sampling_options": {"allowed_token_ids": [70]}}}, "allowed_token_ids"),
        ({"extra_args": {"sampling_options": {"allowed_token_ids": []}}}, "allowed_token_ids"),
        ({"extra_args": {"sampling_options": {"bad_words_token_ids": [[70]]}}}, "bad_words_token_ids"),
        ({"extra_args": {"sampling_options": {"logprob_token_ids": [70]}}}, "logprob_token_ids"),
        ({"extra_args": {"sampling_options": {"detokenize": False}}}, "detokenize"),
        ({"stop_conditions": {"max_thinking_tokens": 0}}, "max_thinking_tokens"),
        ({"output_options": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ],
)
def test_an_option_without_effect_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(RoundRefusedError, match=f"the option {name} is not supported") as refusal:
        parse_round({"token_ids": [1], **fields}, TargetLimits(Slo(1.0, 0.1)))
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "sampling",
    [
        {"best_of": 1, "length_penalty": 1.0, "use_beam_search": False, "logit_bias": {}},
        {"best_of": None, "length_penalty": None},
        {"best_of": 2, "n": 2},
    ],
)
def test_neutral_values_are_served(sampling: dict[str, Any]) -> None:
    assert unserved_option({"sampling_options": sampling, "stop_conditions": {"max_thinking_tokens": None}}) is None


def test_neutral_values_of_what_dynamo_passes_on_are_served() -> None:
    passed_on = {"bad_words_token_ids": [], "logprob_token_ids": [], "detokenize": True}
    assert unserved_option({"extra_args": {"sampling_options": passed_on}}) is None
    assert unserved_option({"extra_args": {"nvext": {}, "sampling_options": None}}) is None
