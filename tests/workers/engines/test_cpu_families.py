"""SGLang computes each family of the tests on a CPU as transformers does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.harness.tiny_families import FAMILIES, make_family

pytest.importorskip("sglang", exc_type=ImportError)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

TOKENS = 8


def expected(folder: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of the model in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.long
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_gives_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    from tests.harness.lone_engine import generate

    folder = make_family(tmp_path / family, family)
    # Longer than a window, than a page and than the chunk after which states are kept.
    rng = random.Random(3)
    prompt = [rng.randrange(3, 700) for _ in range(203)]
    first, again = generate(folder, family, [prompt, prompt], TOKENS)
    assert first["output_ids"] == again["output_ids"] == expected(folder, prompt)
    assert (first["meta_info"]["cached_tokens"], again["meta_info"]["cached_tokens"]) == (0, 192)
    # A state that is taken up again is as exact as one that was just computed: see `cpu_families.ENVIRONMENT`.
    assert log_probs(again) == pytest.approx(log_probs(first), abs=1e-3)


def log_probs(output: dict[str, Any]) -> list[float]:
    return [log_prob for log_prob, *_ in output["meta_info"]["output_token_logprobs"]]
