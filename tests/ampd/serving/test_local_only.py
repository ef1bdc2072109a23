from typing import Any

import pytest

from ampd.serving.local_only import local_only, uncarried_option

STOCK: dict[str, dict[str, Any]] = {
    "sampling_options": dict.fromkeys(["n", "best_of", "presence_penalty", "temperature", "seed", "guided_decoding"]),
    "stop_conditions": {"max_tokens": 8, "stop": ["x"], "stop_token_ids_hidden": [2], "min_tokens": 3},
    "output_options": {"logprobs": 2, "prompt_logprobs": None},
    "routing": {"priority": 3, "cache_salt": "acme"},
    "extra_args": {"nvext": {"extra_fields": ["engine_data"]}},
}


def with_option(part: str, name: str, value: object) -> dict[str, dict[str, Any]]:
    return {**STOCK, part: {**STOCK[part], name: value}}


def test_a_stock_request_is_carried() -> None:
    assert uncarried_option(STOCK) is None
    assert uncarried_option({}) is None


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("sampling_options", "n", 2),
        ("sampling_options", "best_of", 3),
        ("sampling_options", "presence_penalty", 0.1),
        ("sampling_options", "frequency_penalty", -1.0),
        ("sampling_options", "repetition_penalty", 1.1),
        ("sampling_options", "use_beam_search", True),
        ("sampling_options", "guided_decoding", {"json": {}}),
        ("sampling_options", "an_option_of_tomorrow", 1),
        ("stop_conditions", "max_thinking_tokens", 5),
        ("stop_conditions", "max_tokens", 0),
        ("output_options", "prompt_logprobs", 1),
        ("routing", "lora_name", "adapter"),
        ("extra_args", "logits_processors", ["x"]),
    ],
)
def test_what_couples_positions_or_is_unknown_stays_local(part: str, name: str, value: object) -> None:
    assert uncarried_option(with_option(part, name, value)) == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n", 1), ("presence_penalty", 0.0), ("repetition_penalty", 1.0)),
        *(("top_p", 0.5), ("temperature", 1.3), ("seed", 7)),
    ],
)
def test_neutral_and_memoryless_options_are_carried(name: str, value: object) -> None:
    assert uncarried_option(with_option("sampling_options", name, value)) is None


def test_the_failure_of_a_worker_is_named_before_an_option() -> None:
    assert local_only(None, None) is None
    assert local_only(None, "guided_decoding") == "cannot-carry-guided-decoding"
    assert local_only("resumed", "guided_decoding") == "resumed"
