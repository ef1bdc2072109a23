"""Scripted replies and grammars in the modelled engine, on every route."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.workers.engines.modelled_lab import Lab, Times, fetch, run, tokens
from workers.engines.base import EngineError, EngineRequest
from workers.engines.modelled import ModelledEngine
from workers.engines.replies import OutputPlanner, Replies

END = "<|im_end|>"
EOS: dict[str, Any] = {"eos_token_ids": [2]}
CALLS = [{"name": "search", "arguments": {"q": "rain"}}, {"name": "search", "arguments": {"q": "wind"}}]
CALL_TEXT = '<tool_call>\n{"name": "search", "arguments": {"q": "rain"}}\n</tool_call>'
SCRIPT = ({"content": "I look."}, {"content": "now:", "tool_calls": CALLS[:1]}, {"text": " raw "})


class Chat:
    """One model folder with an engine's planner, and prompts as its template makes them."""

    def __init__(self, folder: Path, replies: Path) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.lab = Lab(folder, Times())
        assert self.ids(END) == EOS["eos_token_ids"]
        self.planner = OutputPlanner(folder, tuple(EOS["eos_token_ids"]), Replies.read(replies))

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, *earlier: str) -> list[int]:
        turns = "".join(f"<|im_start|>assistant\n{text}{END}\n<|im_start|>user\nmore{END}\n" for text in earlier)
        return self.ids(f"<|im_start|>user\nhello, what is the weather today?{END}\n{turns}<|im_start|>assistant\n")

    async def says(self, engine: ModelledEngine, prompt: list[int], room: int = 200, **request: Any) -> str:
        outputs = await run(engine, prompt, room, **EOS, **request)
        return str(self.tokenizer.decode(tokens(outputs), skip_special_tokens=False))


def _chat(model_folder: Path, tmp_path: Path, *lines: Mapping[str, Any]) -> Chat:
    path = tmp_path / "replies.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return Chat(model_folder, path)


@pytest.fixture
def talk(model_folder: Path, tmp_path: Path) -> Chat:
    return _chat(model_folder, tmp_path, *SCRIPT)


async def test_each_turn_has_its_reply(talk: Chat) -> None:
    async with talk.lab.engine("D", planner=talk.planner) as engine:
        assert await talk.says(engine, talk.prompt()) == f"I look.{END}"
        # An older message is what the client made of it.
        assert await talk.says(engine, talk.prompt("\n\nI  look.")) == f"now:\n{CALL_TEXT}{END}"
        assert await talk.says(engine, talk.prompt("I look.", CALL_TEXT)) == f" raw {END}"
        made_up = await talk.says(engine, talk.prompt("a", "b", "c"), 20)
        assert made_up.replace(" ", "").isalpha()


async def test_a_text_without_a_chat_has_no_reply(talk: Chat) -> None:
    async with talk.lab.engine("D", planner=talk.planner) as engine:
        assert (await talk.says(engine, talk.ids("hello, what is the weather"), 20)).replace(" ", "").isalpha()


@pytest.mark.parametrize("sampled", [1, 3])
async def test_a_split_round_has_the_same_reply(talk: Chat, sampled: int) -> None:
    """The second worker sees the first tokens as a part of its prompt."""
    prompt = talk.prompt("I look.")
    async with (
        talk.lab.engine("P", planner=talk.planner) as prefill,
        talk.lab.engine("D", planner=talk.planner) as engine,
    ):
        first = tokens(await run(prefill, prompt, sampled, **EOS))
        await fetch(engine, "r", prompt + first, "P")
        rest = tokens(await run(engine, prompt + first, 200, rid="r", **EOS))
        assert talk.tokenizer.decode(first + rest, skip_special_tokens=False) == f"now:\n{CALL_TEXT}{END}"
        # A whole reply: only its end is missing.
        whole = first + rest[:-1]
        assert tokens(await run(engine, prompt + whole, 200, **EOS)) == EOS["eos_token_ids"]


async def test_a_request_that_ignores_the_end_goes_on_after_the_reply(talk: Chat) -> None:
    async with talk.lab.engine("D", planner=talk.planner) as engine:
        text = await talk.says(engine, talk.prompt(), 40, stop_conditions={"ignore_eos": True})
        assert text.startswith("I look.")
        assert END not in text
        assert len(talk.ids(text)) > len(talk.ids("I look."))


def _guided(**guide: Any) -> dict[str, Any]:
    return {"sampling_options": {"guided_decoding": guide}}


OBJECT = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
CALL_SCHEMA = {"properties": {"name": {"enum": ["search"]}, "parameters": OBJECT}, "required": ["name", "parameters"]}


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(
    ("line", "guide", "answer"),
    [
        ({"tool_calls": CALLS}, {"json": {"type": "array", "minItems": 1, "items": CALL_SCHEMA}}, "both"),
        ({"tool_calls": CALLS}, {"json": '{"type": "array"}'}, "both"),
        ({"tool_calls": CALLS}, {"json": OBJECT}, '{"q": "rain"}'),
        ({"content": '{"q": "snow"}'}, {"json": OBJECT}, '{"q": "snow"}'),
        ({"content": '{"q": "snow"}'}, {"json": json.dumps(OBJECT)}, '{"q": "snow"}'),
        ({"content": "no"}, {"choice": ["yes", "no"]}, "no"),
    ],
)
async def test_a_scripted_reply_within_a_grammar_is_the_whole_answer(
    model_folder: Path, tmp_path: Path, line: dict[str, Any], guide: dict[str, Any], answer: str, ignore_eos: bool
) -> None:
    talk = _chat(model_folder, tmp_path, line)
    async with talk.lab.engine("D", planner=talk.planner) as engine:
        request = {**_guided(**guide), "stop_conditions": {"ignore_eos": ignore_eos, "min_tokens": 300}}
        outputs = await run(engine, talk.prompt(), 400, **EOS, **request)
    both = [{"name": call["name"], "parameters": call["arguments"]} for call in CALLS]
    text = talk.tokenizer.decode(tokens(outputs), skip_special_tokens=False)
    assert text == (json.dumps(both) if answer == "both" else answer)
    assert outputs[-1].finish_reason == "stop"


class Counted(list[int]):
    """Tokens that count how often they are read."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.read += len(found) if isinstance(at, slice) else 1
        return found


def test_a_long_reply_is_found_without_a_comparison_per_token(model_folder: Path, tmp_path: Path) -> None:
    reply = "now " * 1_000 + "and" + " now" * 1_000
    talk = _chat(model_folder, tmp_path, {"text": reply})
    whole = talk.ids(reply)
    known = 1 + next(at for at, token_id in enumerate(whole) if whole.count(token_id) == 1)
    context = Counted(talk.prompt() + whole[:known])
    planned = talk.planner.plan(EngineRequest("r", "s", context, None))
    assert planned is not None
    assert list(planned.token_ids) == whole[known:]
    assert context.read < 3 * len(context)


@pytest.mark.parametrize(
    ("line", "guide", "words"),
    [
        ({"content": "a"}, {"regex": "a+"}, "grammar of this kind"),
        ({"content": "not JSON"}, {"json": OBJECT}, "--replies and a reply to this turn that is JSON"),
        pytest.param({"content": "[" * 100_000}, {"json": OBJECT}, "that is JSON", id="nested"),
        ({"session": "other", "content": "{}"}, {"json": OBJECT}, "that is JSON"),
        ({"content": "perhaps"}, {"choice": ["yes", "no"]}, "that is one of the choices"),
        ({"session": "other", "content": "no"}, {"choice": ["yes", ""]}, "that is one of the choices"),
    ],
)
async def test_a_grammar_without_a_reply_that_fits_is_refused(
    model_folder: Path, tmp_path: Path, line: dict[str, Any], guide: dict[str, Any], words: str
) -> None:
    talk = _chat(model_folder, tmp_path, line)
    async with talk.lab.engine("D", planner=talk.planner) as engine:
        with pytest.raises(EngineError, match=words) as refused:
            await run(engine, talk.prompt(), 20, **EOS, **_guided(**guide))
        assert refused.value.status == 400
        assert engine.load().running_requests == 0
