"""Two real SGLang engines of one architecture with other weights: no KV of one is used in the other."""

from __future__ import annotations

import pytest

from ampd.tiny_model import TinyModel, make_tiny_model

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.sglang_pair import LocalPeers, Pair, SwitchedTransport, empty, pair_settings, read, rid, run, text
from workers.engines.sglang import SglangEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.mark.long
async def test_kv_of_other_weights_is_refused(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> None:
    prompt = text(171, 400)
    alone = await run(pair.decode, "alone", prompt, 16)
    await empty(pair.decode)
    folder = make_tiny_model(tmp_path_factory.mktemp("other") / "tiny", TinyModel(seed=1))
    foreign = Pair(SglangEngine(pair_settings(folder), SwitchedTransport), pair.decode, LocalPeers())
    try:
        await foreign.prefill.start()
        foreign.connect()
        theirs = await run(foreign.prefill, "s", prompt, 16)
        request_ids = [rid(), rid()]
        reads = [await read(pair.decode, request_id, prompt, "P", 60.0) for request_id in request_ids]
        output = await run(pair.decode, "s", prompt, 16, request_ids[0])
    finally:
        await foreign.prefill.stop()
        pair.connect()
    wrong = sum(ours != expected for ours, expected in zip(output.token_ids, alone.token_ids, strict=True))
    assert (wrong, [read.tokens for read in reads]) == (0, [0, 0])
    assert output.cached_tokens == 0
    assert theirs.token_ids != alone.token_ids
    assert all("weights or settings differ" in str(read.error) for read in reads)
    await empty(pair.decode)


async def test_equal_engines_have_one_fingerprint_and_publish_it(pair: Pair) -> None:
    assert pair.prefill.info.fingerprint == pair.decode.info.fingerprint == pair.decode.kv.store.geometry.fingerprint
    assert len(pair.prefill.info.fingerprint) == 64
