"""Two engines whose KV differs in its type: each read says so, and each computes what the other has."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from ampd.tiny_model import make_tiny_model

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.sglang_cells import NEW, connected, started, with_log_probs
from tests.harness.sglang_pair import PAGE, pair_settings, remote_round, text

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("forked"),
]


async def test_bf16_and_fp32_are_not_exchanged(tmp_path: Path) -> None:
    settings = pair_settings(make_tiny_model(tmp_path / "model"))
    async with AsyncExitStack() as stack:
        prefill = await started(stack, settings)
        decode = await started(stack, settings.model_copy(update={"dtype": "bfloat16"}))
        pair = connected(prefill, decode)
        new = NEW + PAGE  # enough for a page that only the decode worker has
        prompt: list[int] = []
        for number in range(3):
            prompt = prompt + text(number, 200)
            alone = await with_log_probs(prefill, prompt)
            played = await remote_round(pair, "s", prompt, new)
            assert played.tokens[:1] == alone.token_ids[:1]
            assert len(played.tokens) == new
            assert played.to_prefill is not None
            assert played.to_decode is not None
            # In the first round the decode worker has nothing that could be read.
            assert (played.to_prefill.error is None) == (number == 0)
            assert "P has another kind of KV: " in str(played.to_decode.error)
            assert "bytes" in str(played.to_decode.error)
            if not number:
                assert not played.decode.cached_tokens
                handed = await with_log_probs(decode, [*prompt, played.tokens[0]])
                assert played.tokens[1 : 1 + NEW] == handed.token_ids
            prompt = prompt + played.tokens
