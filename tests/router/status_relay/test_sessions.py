"""Where agent programs name their sessions, and the line that Claude Code changes in each request."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from ampd.errors import UserError
from ampd.keys import from_ascii_name
from router.status_relay.sessions import SOURCES, SessionNames, chosen_sources, without_changing_line

DOCS = Path(__file__).parents[3] / "docs"
LINE = "x-anthropic-billing-header: cc_version=9.9.1; cc_entrypoint=cli; cch=01234;"


def named(headers: dict[str, str], body: Any = None, names: str = "") -> str:
    raw = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    return SessionNames(chosen_sources(names, "test")).of(CIMultiDictProxy(CIMultiDict(headers)), raw)


@pytest.mark.parametrize(
    ("headers", "body", "name"),
    [
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "scout"}, {}, "s/scout"),
        ({"x-claude-code-agent-id": "scout"}, {"metadata": {"user_id": "user_7"}}, ""),
        ({"Session-Id": "tree", "thread-id": "root"}, {"prompt_cache_key": "root"}, "tree/root"),
        ({"session_id": "old", "conversation_id": "old"}, {}, "old"),
        ({"X-Session-Id": "ses_1", "x-session-affinity": "ses_1", "x-parent-session-id": "ses_0"}, {}, "ses_1"),
        ({"x-parent-session-id": "p", "x-dynamo-parent-session-id": "p", "x-request-id": "r"}, {}, ""),
        ({"x-litellm-session-id": "run"}, {"prompt_cache_key": "other"}, "run"),
        ({"X-Hermes-Session-Id": "h"}, {}, "h"),
        ({"Helicone-Session-Id": "h", "X-Litellm-Session-Id": "run"}, {}, "run"),
        ({"Helicone-Session-Id": "h"}, {}, "h"),
        ({"x-openwebui-chat-id": "chat"}, {}, "chat"),
        ({"x-kilocode-taskid": "task"}, {}, "task"),
        ({}, {"prompt_cache_key": "conversation"}, "conversation"),
        ({}, {"metadata": {"session_id": "m"}, "prompt_cache_key": "other"}, "m"),
        ({}, {"metadata": {"thread_id": "graph"}}, "graph"),
        ({}, {"metadata": {"user_id": "user_f_account__session_1b-2c"}}, "1b-2c"),
        ({}, {"metadata": {"user_id": '{"device_id":"d","session_id":"1b-2c"}'}}, "1b-2c"),
        ({}, {"user": "somebody", "metadata": {"user_id": "somebody"}}, ""),
        ({}, {"prompt_cache_key": 7, "metadata": "text"}, ""),
        ({}, {"prompt_cache_key": "k" * 257}, ""),
        ({}, b"{", ""),
        ({}, b'["prompt_cache_key"]', ""),
    ],
)
def test_a_session_is_named_where_its_program_names_it(headers: dict[str, str], body: Any, name: str) -> None:
    assert named(headers, body) == name


def test_a_value_of_the_body_may_stand_behind_a_long_prompt() -> None:
    messages = [{"role": "user", "content": 'a "prompt_cache_key": "wrong" ' * 1000}]
    assert named({}, {"messages": messages, "prompt_cache_key": "right"}) == "right"


@pytest.mark.parametrize("name", ["sitzung-\u00e4", "\u4f1a\u8bdd 7%", "two\nlines", "UTF-8''x\u00e9"])
def test_names_of_any_characters_travel_as_ascii(name: str) -> None:
    sent = named({}, {"prompt_cache_key": name})
    assert sent.isascii()
    assert sent.isprintable()
    assert from_ascii_name(sent) == name
    assert from_ascii_name("plain%20") == "plain%20"


def test_further_names_count_before_the_known_ones() -> None:
    names = "X-My-Run+x-my-agent, body:extra.run"
    headers = {"x-my-run": "run", "x-my-agent": "scout", "x-session-id": "other"}
    assert named(headers, {}, names) == "run/scout"
    assert named({"x-session-id": "other"}, {"extra": {"run": "run"}}, names) == "run"
    assert named({**headers, "x-dynamo-session-id": "first"}, {}, names) == "first"


@pytest.mark.parametrize("names", ["a b", "x+", "body:", "body:a..b", "x-a+y+z"])
def test_a_wrong_name_is_refused(names: str) -> None:
    with pytest.raises(UserError, match="--session-names"):
        chosen_sources(names, "test")


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ({"system": [{"type": "text", "text": LINE}, {"text": "rules"}]}, {"system": [{"text": "rules"}]}),
        ({"system": f"You are Claude Code.\n{LINE}\nrules"}, {"system": "You are Claude Code.\nrules"}),
        ({"system": [{"text": "a"}, {"text": f" {LINE}\nb"}]}, {"system": [{"text": "a"}, {"text": "b"}]}),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": f"{LINE}\nb"}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
        ),
        ({"messages": [{"role": "user", "content": LINE}]}, {"messages": [{"role": "user", "content": ""}]}),
        ({"instructions": f"{LINE}\nb", "input": "x"}, {"instructions": "b", "input": "x"}),
        (
            {"input": [{"role": "developer", "content": [{"type": "input_text", "text": f"{LINE}\nb"}]}]},
            {"input": [{"role": "developer", "content": [{"type": "input_text", "text": "b"}]}]},
        ),
    ],
)
def test_the_line_is_left_out_wherever_the_system_speaks(body: dict[str, Any], left: dict[str, Any]) -> None:
    assert json.loads(without_changing_line(json.dumps(body).encode())) == left


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": f"what is\n{LINE}"}]},
        {"system": f"the text {LINE} within a line"},
        {"system": 7, "messages": "text", "input": [LINE]},
        [LINE],
    ],
)
def test_other_texts_stay_as_they_are(body: Any) -> None:
    raw = json.dumps(body, indent=1).encode()
    assert without_changing_line(raw) is raw


def test_a_body_that_is_no_json_stays_as_it_is() -> None:
    for raw in (f'{{"system": "{LINE}'.encode(), f'{{"system": "{LINE}", "a": "\\ud800"}}'.encode()):
        assert without_changing_line(raw) is raw


def test_each_source_is_in_the_docs_in_its_order() -> None:
    text = (DOCS / "coordinator.md").read_text(encoding="utf-8")
    table = text.split("### Headers that name a session")[1].split("\n### ")[0]
    rows = [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in row]
    assert listed == [name for source in SOURCES for name in (source.session, source.part) if name]
