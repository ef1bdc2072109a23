"""The SGLang engine: requests as stock Dynamo maps them, errors in one line, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from ampd.errors import UserError
from ampd.tiny_model import TinyModel, make_tiny_model
from workers.engines.base import EngineError, EngineOutput, EngineRequest

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.process_ends import alive
from tests.harness.sglang_pair import rid, run, text
from tests.waiting import until
from workers.engines.sglang import SglangEngine, SglangSettings
from workers.engines.sglang_request import _SAMPLING_FIELDS, logprob_arguments, sampling_params

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="session"),
]

MODEL_TOKENS = 2048
CONTEXT_TOKENS = MODEL_TOKENS - 6
"""SGLang takes no prompt of this length or more."""
PROMPT = text(1, 120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = TinyModel(layers=2, hidden_size=128, heads=2, kv_heads=1, max_context_tokens=MODEL_TOKENS)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", sizes)


def settings_of(model: Path, **changes: Any) -> SglangSettings:
    usual = {"dtype": "float32", "device": "cpu", "max_total_tokens": 8000}
    return SglangSettings(**{"model": model, **usual, **changes})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(model: Path, forked: None) -> AsyncIterator[SglangEngine]:  # noqa: ARG001
    engine = SglangEngine(settings_of(model))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


async def ask(engine: SglangEngine, new: int | None, **request: Any) -> EngineOutput:
    request.setdefault("sampling_options", {}).setdefault("temperature", 0.0)
    return await run(engine, "", PROMPT, new, **request)  # type: ignore[arg-type]


async def answer(engine: SglangEngine, model: Path, new: int, **guided: Any) -> str:
    output = await ask(engine, new, sampling_options={"guided_decoding": guided})
    return str(Tokenizer.from_file(str(model / "tokenizer.json")).decode(output.token_ids))


async def test_info_says_what_the_engine_is(engine: SglangEngine) -> None:
    assert engine.info.max_context_tokens == CONTEXT_TOKENS
    assert engine.info.kv_capacity_tokens == 8000
    assert engine.info.kv_bytes_per_token == 2 * 2 * 64 * 4
    assert engine.info.page_size_tokens == 16


async def test_outputs_come_token_by_token(engine: SglangEngine) -> None:
    request = EngineRequest(rid(), "", PROMPT, 6, {"sampling_options": {"temperature": 0.0}})
    outputs = [output async for output in engine.generate(request)]
    assert [len(output.token_ids) for output in outputs] == [1] * 6
    assert [output.finish_reason for output in outputs] == [None] * 5 + ["length"]
    assert (outputs[-1].prompt_tokens, outputs[-1].completion_tokens) == (120, 6)


async def test_prefill_only_publishes_without_a_token(engine: SglangEngine) -> None:
    output = await run(engine, "prefill-only", text(2, 100), 0)
    assert output.token_ids == []
    assert output.finish_reason == "length"
    assert await engine.kv.held_tokens("prefill-only") == 96
    await engine.kv.release_session("prefill-only")


async def test_stop_tokens_end_the_output_and_are_named(engine: SglangEngine) -> None:
    free = (await ask(engine, 10)).token_ids
    at = next(at for at, token in enumerate(free) if at and token not in free[:at])
    visible = await ask(engine, 10, stop_conditions={"stop_token_ids": [free[at]]})
    assert visible.token_ids == free[: at + 1]
    assert (visible.finish_reason, visible.stop_reason) == ("stop", free[at])
    hidden = await ask(engine, 10, stop_conditions={"stop_token_ids_hidden": [free[at]]})
    assert (hidden.token_ids, hidden.finish_reason, hidden.stop_reason) == (visible.token_ids, "stop", None)
    longer = await ask(engine, 10, stop_conditions={"stop_token_ids": [free[at]], "min_tokens": 10})
    assert len(longer.token_ids) == 10
    assert free[at] not in longer.token_ids[:9]


async def test_a_stop_token_outside_the_vocabulary_does_not_end_the_engine(engine: SglangEngine) -> None:
    stops = {"stop_token_ids_hidden": [999_999_999], "min_tokens": 2}
    assert len((await ask(engine, 4, stop_conditions=stops)).token_ids) == 4
    assert len((await ask(engine, 4)).token_ids) == 4


NO_TOKEN_LEFT: dict[str, dict[str, Any]] = {
    "a penalty that makes logits infinite": {
        "sampling_options": {"repetition_penalty": 1e-40},
        "stop_conditions": {"ignore_eos": True},
    },
    "a grammar's end before min_tokens": {
        "sampling_options": {"guided_decoding": {"choice": ["a", "b"]}},
        "stop_conditions": {"min_tokens": 20},
    },
    "all tokens forbidden": {"stop_conditions": {"stop_token_ids": list(range(768)), "min_tokens": 4}},
}


@pytest.mark.parametrize("name", list(NO_TOKEN_LEFT))
async def test_a_request_that_leaves_no_token_does_not_end_the_engine(engine: SglangEngine, name: str) -> None:
    """Also where neither the coordinator nor the worker's own check has refused it before."""
    sampling = {**NO_TOKEN_LEFT[name].get("sampling_options", {}), "temperature": 1.0, "top_p": 0.9}
    before = (await ask(engine, 8)).token_ids
    asking = asyncio.create_task(ask(engine, 24, **{**NO_TOKEN_LEFT[name], "sampling_options": sampling}))
    lost = asyncio.create_task(engine.wait_lost())
    await asyncio.wait({asking, lost}, return_when=asyncio.FIRST_COMPLETED)
    assert not lost.done(), lost.result()
    lost.cancel()
    output = await asking
    assert output.token_ids
    if "grammar" in name:
        assert output.finish_reason == "stop"
        assert len(output.token_ids) < 5
    assert (await ask(engine, 8)).token_ids == before


async def test_log_probabilities_align_with_tokens(engine: SglangEngine) -> None:
    request = EngineRequest(
        rid(), "", PROMPT, 5, {"sampling_options": {"temperature": 0.0}, "output_options": {"logprobs": 0}}
    )
    outputs = [output async for output in engine.generate(request)]
    values = [output.log_probs for output in outputs]
    assert [len(value or []) for value in values] == [1] * 5
    assert all(-50 < value[0] <= 0 for value in values if value)
    request = EngineRequest(rid(), "", PROMPT, 3, {**request.request, "output_options": {"logprobs": 2}})
    async for output in engine.generate(request):
        assert output.top_logprobs is not None
        best = output.top_logprobs[0]
        assert len(best) == 2
        assert best[0]["token_id"] == output.token_ids[0]
        assert math.isclose(best[0]["logprob"], (output.log_probs or [0.0])[0], abs_tol=1e-4)


async def test_a_seed_that_sglang_would_ignore_is_refused(engine: SglangEngine) -> None:
    with pytest.raises(EngineError, match="enable_deterministic_inference") as refused:
        await ask(engine, 5, sampling_options={"temperature": 1.0, "seed": 7})
    assert refused.value.status == 400
    assert len((await ask(engine, 5, sampling_options={"temperature": 0.0, "seed": 7})).token_ids) == 5


async def test_several_choices_carry_their_index(engine: SglangEngine) -> None:
    options = {"sampling_options": {"temperature": 1.0, "n": 3}, "stop_conditions": {"ignore_eos": True}}
    request = EngineRequest(rid(), "choices", text(3, 200), 12, options)
    tokens: dict[int, list[int]] = {}
    finished: dict[int, EngineOutput] = {}
    async for output in engine.generate(request):
        tokens.setdefault(output.index, []).extend(output.token_ids)
        if output.finish_reason:
            finished[output.index] = output
    assert {index: len(choice) for index, choice in tokens.items()} == {0: 12, 1: 12, 2: 12}
    assert len({tuple(choice) for choice in tokens.values()}) == 3
    assert [output.cached_tokens for output in finished.values()] == [0, 0, 0]
    await engine.kv.release_session("choices")
    assert engine.load().running_requests == 0


async def test_a_request_is_in_the_decode_batch_from_its_first_token_on(engine: SglangEngine) -> None:
    outputs = engine.generate(EngineRequest(rid(), "", text(9, 1500), 4))
    first = asyncio.ensure_future(anext(outputs))
    while not first.done():
        load = engine.load()
        assert (load.running_requests, load.running_context_tokens) == (0, 0)
        await asyncio.sleep(0.001)
    assert engine.load().running_requests == 1
    assert engine.load().running_context_tokens == 1500 + len(first.result().token_ids)
    await outputs.aclose()
    assert engine.load().running_requests == 0


async def test_guided_decoding_keeps_to_its_guide(engine: SglangEngine, model: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    assert isinstance(json.loads(await answer(engine, model, 60, json=schema))["ok"], bool)
    assert re.fullmatch("[ab]{4}c", await answer(engine, model, 20, regex="[ab]{4}c"))
    assert await answer(engine, model, 20, choice=["red wine", "white wine"]) in ("red wine", "white wine")
    assert await answer(engine, model, 20, grammar='root ::= "x" "yz"') == "xyz"
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "hello"}}
    assert await answer(engine, model, 20, structural_tag=tag) == "hello"


EXPLODING = "(((a{1,100}){1,100}){1,100}){60,100}"
"""XGrammar takes a second per token after 90 tokens, and longer for each further one."""

TOO_MANY_WAYS: dict[str, dict[str, Any]] = {
    "a regular expression": {"regex": EXPLODING},
    "a pattern": {"json": {"type": "string", "pattern": f"^{EXPLODING}$"}},
    "EBNF, after some tokens": {
        "grammar": 'root ::= part{200,300}\npart ::= part part part | "a" | part "a" | "a" part'
    },
    "tags with a pattern": {
        "structural_tag": {"type": "structural_tag", "format": {"type": "regex", "pattern": EXPLODING}}
    },
}


@pytest.mark.parametrize("name", list(TOO_MANY_WAYS))
async def test_a_grammar_that_fits_in_too_many_ways_ends_its_own_request(engine: SglangEngine, name: str) -> None:
    before = (await ask(engine, 8)).token_ids
    with pytest.raises(EngineError) as refused:
        await ask(engine, 200, sampling_options={"guided_decoding": TOO_MANY_WAYS[name]})
    assert refused.value.status == 400
    assert (await ask(engine, 8)).token_ids == before


async def test_grammars_of_both_kinds_are_in_one_batch(engine: SglangEngine, model: Path) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    found = await asyncio.gather(
        *(answer(engine, model, 60, json={**schema, "additionalProperties": False}) for _ in range(3)),
        *(answer(engine, model, 60, regex=f"[ab]{{30,{number}}}c") for number in (30, 40, 50)),
        answer(engine, model, 20, json={"type": "string", "pattern": "^x[yz]{3}$"}),
    )
    assert all(isinstance(json.loads(each)["ok"], bool) for each in found[:3])
    assert all(re.fullmatch("[ab]{30,50}c", each) for each in found[3:6])
    assert re.fullmatch("x[yz]{3}", json.loads(found[6]))


async def test_choices_keep_their_characters(engine: SglangEngine, model: Path) -> None:
    for choice in ('a "quoted" one', "back\\slash \\u0041", "tab\tand\nline", "control \x01", "#%{}/"):
        assert await answer(engine, model, 60, choice=[choice]) == choice
    assert await answer(engine, model, 60, grammar=r'root ::= "\u0041\x42"') == "AB"


async def test_a_bad_guide_is_the_callers_error(engine: SglangEngine) -> None:
    for guided in ({"regex": "(["}, {"grammar": "root = nonsense ::"}, {"json": {"$ref": "#"}}):
        with pytest.raises(EngineError) as refused:
            await ask(engine, 5, sampling_options={"guided_decoding": guided})
        assert refused.value.status == 400, guided
    assert len((await ask(engine, 5)).token_ids) == 5


@pytest.mark.parametrize("length", [0, CONTEXT_TOKENS, MODEL_TOKENS, MODEL_TOKENS + 500])
async def test_a_prompt_that_does_not_fit_is_the_callers_error(engine: SglangEngine, length: int) -> None:
    with pytest.raises(EngineError) as refused:
        await run(engine, "", text(4, length), 5)
    assert refused.value.status == 400
    assert "\n" not in str(refused.value)


async def test_output_ends_with_the_context(engine: SglangEngine) -> None:
    prompt = text(5, CONTEXT_TOKENS - 10)
    output = await run(engine, "", prompt, None, sampling_options={"temperature": 0.0})  # type: ignore[arg-type]
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 10


@pytest.mark.parametrize("wanted", [10, 11, 70_000])
async def test_a_request_for_more_than_fits_ends_with_the_context(engine: SglangEngine, wanted: int) -> None:
    stops = {"ignore_eos": True, "min_tokens": wanted}
    output = await run(engine, "", text(5, CONTEXT_TOKENS - 10), wanted, stop_conditions=stops)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 10


async def test_closing_several_choices_aborts_them_all(engine: SglangEngine) -> None:
    options = {"temperature": 1.0, "n": 2}
    stream = engine.generate(EngineRequest(rid(), "", PROMPT, 1500, {"sampling_options": options}))
    await anext(stream)
    await stream.aclose()
    manager: Any = engine._manager
    await until(lambda: not manager.rid_to_state)
    assert engine.load().running_requests == 0


async def test_an_engine_is_ready_when_it_has_run_all_that_requests_can_ask_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang compiles the function of the penalties at their first use, for 4 to 13 s in which no round goes on."""
    engine: Any = SglangEngine(settings_of(model))
    alone: set[str] = set()
    together: set[str] = set()
    running: list[set[str]] = []

    async def generate(request: EngineRequest) -> AsyncIterator[EngineOutput]:
        names = set(sampling_params(request, is_deterministic=False)) | set(logprob_arguments(request))
        running.append(names)
        await asyncio.sleep(0)
        (alone if len(running) == 1 else together).update(names)
        running.remove(names)
        yield EngineOutput([1])

    monkeypatch.setattr(engine, "generate", generate)
    engine._info = SimpleNamespace(max_context_tokens=MODEL_TOKENS)
    await engine._warm_up(asyncio.get_running_loop().create_future())
    wanted = {*_SAMPLING_FIELDS, "min_new_tokens", "json_schema", "regex", "ebnf", "return_logprob", "top_logprobs_num"}
    assert wanted <= alone
    assert wanted <= together


def test_a_folder_that_is_no_model_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    for missing, word in (
        ("tokenizer.json", "tokenizer"),
        ("config.json", "config.json"),
        ("model.safetensors", "weights"),
    ):
        folder = tmp_path / missing
        folder.mkdir()
        for file in model.iterdir():
            if file.name != missing:
                (folder / file.name).symlink_to(file)
        with pytest.raises(UserError, match=word):
            SglangEngine(settings_of(folder))
    with pytest.raises(UserError, match="no folder"):
        SglangEngine(settings_of(tmp_path / "nowhere"))


@pytest.mark.long
async def test_a_failed_start_is_one_line_and_leaves_nothing(engine: SglangEngine, model: Path) -> None:
    before = set(multiprocessing.active_children())
    broken = SglangEngine(settings_of(model, engine_args='{"attention_backend": "nonsense"}'))
    with pytest.raises(EngineError, match="SGLang did not start") as failed:
        await broken.start()
    assert "\n" not in str(failed.value)
    assert set(multiprocessing.active_children()) == before
    with pytest.raises(EngineError, match="has not started"):
        _ = broken.kv
    assert len((await ask(engine, 2)).token_ids) == 2


@pytest.mark.long
async def test_a_pool_that_the_store_refuses_is_named_in_the_one_line(
    engine: SglangEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    before = set(multiprocessing.active_children())
    refused = SglangEngine(settings_of(model))
    with pytest.raises(EngineError) as failed:
        await refused.start()
    assert str(failed.value) == "SGLang did not start: the KV store needs KV in the layout nhd, not hnd"
    assert set(multiprocessing.active_children()) == before
    assert len((await ask(engine, 2)).token_ids) == 2


def test_a_degree_that_does_not_divide_the_heads_is_refused(model: Path) -> None:
    with pytest.raises(UserError, match="--tp"):
        SglangEngine(settings_of(model, tp=3))


WORKER = """
import asyncio, sys
from pathlib import Path
from workers.engines.sglang import SglangEngine, SglangSettings
from workers.engines.sglang_request import _SAMPLING_FIELDS, logprob_arguments, sampling_params

async def main():
    engine = SglangEngine(SglangSettings(
        model=Path(sys.argv[1]), device="cpu", max_total_tokens=4000
    ))
    await engine.start()
    print(*(process.pid for process in engine._sglang.children), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.long
async def test_engine_processes_end_with_a_killed_worker(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(script), str(model)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: ASYNC220
    try:
        assert worker.stdout is not None
        line = await asyncio.to_thread(worker.stdout.readline)
        children = [int(number) for number in line.split()]
        assert len(children) >= 2
    finally:
        worker.send_signal(signal.SIGKILL)
        await asyncio.to_thread(worker.wait)
        if worker.stdout:
            worker.stdout.close()
    await until(lambda: not any(alive(child) for child in children), 20.0)
    assert not any(name.startswith("ampd-") for name in os.listdir(tmp_path))  # noqa: PTH208
