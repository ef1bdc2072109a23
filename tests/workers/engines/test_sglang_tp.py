"""SGLang on several ranks without a GPU and without the KV exchange: it computes the tokens of one rank."""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ampd.tiny_model import TinyModel, make_tiny_model

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.sglang_pair import text
from workers.engines.sglang import SglangEngine, SglangSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

KV_HEADS = 2
NEW_TOKENS = 16
WITHOUT_LINKER = {
    "enable_unified_cache_external_linker": False,
    "unified_cache_external_linker_backend": None,
    "unified_cache_external_linker_config": None,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = TinyModel(layers=2, hidden_size=128, heads=4, kv_heads=KV_HEADS, max_context_tokens=2048)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", sizes)


class Ranks(SglangEngine):
    """The processes of an engine, without AMPD's linker in them."""

    async def start(self) -> None:
        nowhere = SimpleNamespace(store=SimpleNamespace(addresses=[], memory=SimpleNamespace(place=(0, 0, 0))))
        self._launch(cast(Any, nowhere))
        self._take_signals_back()

    async def tokens(self, prompt: list[int]) -> list[int]:
        sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        output: Any = await self._engine.async_generate(input_ids=prompt, sampling_params=sampling)
        return list(output["output_ids"])


async def generated(model: Path, tp: int) -> list[list[int]]:
    """What an engine of this degree generates: cold, over its own cache, and for another prompt."""
    arguments = json.dumps(WITHOUT_LINKER)
    settings = SglangSettings(
        model=model, tp=tp, dtype="float32", device="cpu", max_total_tokens=4096, engine_args=arguments
    )
    engine = Ranks(settings)
    since_s = time.monotonic()
    pids: list[int] = []
    try:
        await engine.start()
        pids = [process.pid for process in engine._processes if process.pid]
        print(f"tp {tp}: {len(pids)} processes, started in {time.monotonic() - since_s:.1f} s", end="")
        prompts = [text(1, 203), text(1, 203) + text(2, 50), text(3, 90)]
        outputs = [await engine.tokens(prompt) for prompt in prompts]
        print(f", {len(prompts)} requests after {time.monotonic() - since_s:.1f} s", end="")
    finally:
        await engine.stop()
    print(f", ended after {time.monotonic() - since_s:.1f} s")
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]  # noqa: ASYNC240, PTH110
    return outputs


async def test_more_ranks_compute_the_same_tokens(
    model: Path,
    forked: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    importlib.import_module("sglang.srt.entrypoints.engine")  # so that the times below are those of engines
    one = await generated(model, 1)
    assert [len(tokens) for tokens in one] == [NEW_TOKENS] * 3
    for tp in (2, 4):  # with 4 ranks each of the 2 KV heads is on two of them
        assert await generated(model, tp) == one
