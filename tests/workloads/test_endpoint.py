"""The client of OpenAI endpoints: what it sends to servers that understand less, and the errors that it shows."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.main import main
from tests.workloads.conftest import Replay
from workloads.endpoint import RequestError, _events
from workloads.trace import Round, write_trace

from .lab import GROWING, session


def test_endpoints_without_extensions_get_plain_chat(replay: Replay) -> None:
    behaviour = replay.behaviour
    behaviour.dynamo = behaviour.completions = behaviour.accepts_ignore_eos = False
    code, result = replay(GROWING)
    assert code == 0
    first, second, _ = behaviour.rounds
    assert not {"nvext", "ignore_eos", "return_token_ids"} & set(first)
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][0] == first["messages"][0]
    answer = "".join(f" t{item}" for item in behaviour.outputs[-3])
    assert second["messages"][1]["content"] == answer
    assert len(first["messages"][0]["content"].split()) == 30
    assert result["routes"] == {"local": 0, "remote": 0}
    assert result["kv_bytes"] == {"history": None, "increment": None}


def test_real_words_are_sent_as_chat(replay: Replay) -> None:
    replay(session("a", Round(incr_tokens=2, output_tokens=1, text="guten Tag")))
    assert replay.behaviour.rounds[0]["messages"] == [{"role": "user", "content": "guten Tag"}]


@pytest.mark.parametrize("broken", [{"status": 503}, {"fail_after_chunks": 1}])
def test_server_errors_are_counted_and_shown(replay: Replay, broken: dict[str, int]) -> None:
    for name, value in broken.items():
        setattr(replay.behaviour, name, value)
    one_session = GROWING if "status" in broken else session("a", *GROWING.rounds[:2])
    code, result = replay(one_session, flags=("--ttft", "9", "--itl", "9"))
    message = "no live decode worker" if "status" in broken else "worker died"
    assert code == 1
    assert (result["errors"], result["rounds"], result["sessions"]) == (1, 0, 1)
    assert message in result["records"][0]["error"]
    assert message in result["stdout"]
    # The rounds that were never sent count as missed.
    assert result["attainment"] == {"rounds": 0.0, "sessions": 0.0}


@pytest.mark.parametrize(("event", "words"), [("", "the stream holds no JSON: "), ("event: error", "")])
@pytest.mark.parametrize("data", ["{", pytest.param("[" * 100_000, id="nested")])
async def test_events_that_are_not_json_are_errors_of_their_request(event: str, words: str, data: str) -> None:
    async def lines() -> AsyncIterator[str]:
        yield event
        yield f"data: {data}"

    with pytest.raises(RequestError) as failure:
        await anext(_events(lines()))
    assert str(failure.value).startswith(words + data[:80])
    assert len(str(failure.value)) <= 200


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [3]},
        {"choices": 3},
        {"choices": [{"delta": "text"}]},
        {"choices": [{"text": 3}]},
        {"choices": [{"token_ids": "ab"}]},
        {"choices": [{"delta": {"tool_calls": [3]}}]},
        {"usage": 3},
        {"usage": ["ab", "c"]},
        {"nvext": 3},
        {"nvext": {"engine_data": 3}},
        {"nvext": {"engine_data": {"ampd": [3]}}},
        {"usage": {"prompt_tokens": "many"}},
        {"usage": {"prompt_tokens": 1.5}},
        {"usage": {"prompt_tokens_details": 3}},
        {"usage": {"prompt_tokens_details": {"cached_tokens": "all"}}},
    ],
)
async def test_events_of_another_form_are_errors_of_their_request(event: Any) -> None:
    async def lines() -> AsyncIterator[str]:
        yield f"data: {json.dumps(event)}"

    with pytest.raises(RequestError, match="the stream holds an event of an unknown form: "):
        await anext(_events(lines()))


async def test_fields_that_are_null_are_left_out() -> None:
    events = [
        {"choices": None, "usage": None, "nvext": None},
        {"choices": [{"text": None, "delta": None, "token_ids": None}], "nvext": {"engine_data": None}},
        {"choices": [{"delta": {"content": None, "tool_calls": None}}], "usage": {"prompt_tokens": None}},
    ]

    async def lines() -> AsyncIterator[str]:
        for event in events:
            yield f"data: {json.dumps(event)}"

    chunks = [chunk async for chunk in _events(lines())]
    assert [(chunk.text, chunk.token_ids, chunk.usage) for chunk in chunks] == [("", None, {})] * 3


def test_a_url_that_does_not_answer_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workloads.endpoint.CONNECT_TIMEOUT_S", 0.1)
    trace = tmp_path / "t.jsonl"
    write_trace([GROWING], trace)
    with socket.socket() as listener:
        # Listens, never answers: the connection is made and nothing comes.
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        silent = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["replay", str(trace), "--url", silent]) == 2
    assert main(["replay", str(trace), "--url", silent]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2
    assert all("does not answer" in line for line in lines)
