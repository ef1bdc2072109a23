"""Each snippet of the page on clients runs against a graph, and its rounds are one session there."""

import asyncio
import json
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from ampd.keys import session_key
from ampd.state.redis_store import StateStore
from ampd.tiny_model import tiny_model_path
from benchmarks.clients import aiperf
from benchmarks.clients.environment import aiperf_program, clients_node_modules, clients_python
from benchmarks.clients.programs import codex_command
from tests.harness.graph import Graph, profile
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
SNIPPETS = dict(re.findall(r"```python (\w+)\n(.*?)```", PAGE, re.DOTALL))
(JAVASCRIPT,) = re.findall(r"```js\n(.*?)```", PAGE, re.DOTALL)
(CODEX,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
(CONVERSATION,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
(AIPERF,) = re.findall(r"```sh\n(aiperf profile .*?)```", PAGE, re.DOTALL)
MODULES = {
    "langgraph": "langchain_openai",
    "llama_index": "llama_index.llms.openai_like",
    "responses": "openai",
}
"""The module that shows whether a snippet's packages are installed, where it has another name than the snippet."""
PYTHON = clients_python()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(graph: Graph) -> AsyncIterator[Graph]:
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.001)
    coordinator = graph.start_coordinator("always-remote")
    graph.start_frontend()
    for role in ("prefill", "decode"):
        await graph.new_worker(role, perf)
    await graph.until_answers([coordinator])
    store = await graph.store()
    try:
        await until(lambda: _is_counted(store))
    finally:
        await store.close()
    yield graph


async def _is_counted(store: StateStore) -> bool:
    """Whether the rounds of `until_answers` are in what the coordinator published."""
    return await _unnamed(store) >= 3


async def _unnamed(store: StateStore) -> int:
    """Rounds without a session, so far."""
    return sum(entry.view.window.counts.get("unnamed", 0) for entry in (await store.overview()).coordinators)


async def _run(*command: str, folder: Path | None = None) -> tuple[int | None, str]:
    """Exit code and output of a client's code."""
    environment = {**os.environ, "OPENAI_API_KEY": "none", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    environment.pop("PYTHONPATH", None)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment, cwd=folder
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode(errors="replace")


@pytest.mark.long
@pytest.mark.parametrize("name", SNIPPETS)
async def test_a_snippet_is_one_session_of_two_rounds(served: Graph, name: str) -> None:
    module = MODULES.get(name, name)
    if (await _run(PYTHON, "-c", f"import {module}"))[0] != 0:
        pytest.skip(f"{PYTHON} cannot import {module}: make clients")
    session_id = f"client-{name}"
    code = f"URL, SESSION = {served.url!r}, {session_id!r}\n{SNIPPETS[name]}"
    await _is_one_session(served, session_id, partial(_run, PYTHON, "-c", code))


@pytest.mark.long
async def test_the_snippet_in_javascript_is_one_session_of_two_rounds(served: Graph) -> None:
    modules, node = clients_node_modules(), shutil.which("node")
    if node is None or not (modules / "ai").is_dir():
        pytest.skip("Vercel's AI SDK is not installed: make clients")
    session_id = "client-vercel"
    code = f"const URL = {served.url!r}, SESSION = {session_id!r};\n{JAVASCRIPT}"
    run = partial(_run, node, "--input-type=module", "-e", code, folder=modules.parent)
    await _is_one_session(served, session_id, run)


async def test_codex_is_tried_with_the_provider_of_the_page() -> None:
    shown = tomllib.loads(CODEX)
    tried = dict(text.split("=", 1) for text in codex_command("http://127.0.0.1:8000") if "=" in text)
    assert tomllib.loads(f"p={tried['model_providers.ampd']}")["p"] == shown["model_providers"]["ampd"]
    assert tried["model_provider"] == shown["model_provider"]


async def _is_one_session(served: Graph, session_id: str, run: Callable[[], Awaitable[tuple[int | None, str]]]) -> None:
    store = await served.store()
    try:
        unnamed = await _unnamed(store)
        code, output = await run()
        assert code == 0, output[-3000:]
        key = session_key("", session_id)

        async def is_held() -> bool:
            """With more tokens than the first round has, because a worker may publish that one alone."""
            return any(view.held_tokens.get(key, 0) > 40 for view in await store.snapshot())

        await until(is_held)
        binding = await store.binding(key)
        assert binding is not None
        assert binding.epoch == 1
        assert await _unnamed(store) <= unnamed
    finally:
        await store.close()


async def test_aiperf_is_tried_as_the_page_shows_it() -> None:
    shown = shlex.split(AIPERF.replace("\\\n", ""))
    assert shown == aiperf.command("aiperf", "http://127.0.0.1:8000", "MODEL_FOLDER", "conversations.jsonl")
    shown, tried = json.loads(CONVERSATION), json.loads(aiperf.conversations().splitlines()[0])
    assert shown.keys() == tried.keys()
    assert [turn.keys() for turn in shown["turns"]] == [turn.keys() for turn in tried["turns"][:2]]


@pytest.mark.long
async def test_a_conversation_of_aiperf_is_a_session_with_default_headers(served: Graph, tmp_path: Path) -> None:
    program = aiperf_program()
    if program is None:
        pytest.skip("AIPerf is not installed: make clients")
    store = await served.store()
    try:
        before = {key for view in await store.snapshot() for key in view.held_tokens}
        unnamed = await _unnamed(store)
        result = await asyncio.to_thread(aiperf.run, program, served.url, tiny_model_path(), tmp_path)
        assert result["error_request_count"]["avg"] == 0 if result.get("error_request_count") else True

        async def held() -> set[str]:
            keys = {key for view in await store.snapshot() for key in view.held_tokens} - before
            return keys if len(keys) >= aiperf.CONVERSATIONS else set()

        keys = await until(held)
        assert len(keys) == aiperf.CONVERSATIONS
        bindings = [await store.binding(key) for key in keys]
        assert [binding.epoch for binding in bindings if binding] == [1] * aiperf.CONVERSATIONS
        assert await _unnamed(store) <= unnamed
    finally:
        await store.close()
