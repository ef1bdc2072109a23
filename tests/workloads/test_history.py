"""Contexts of replayed sessions: prompts extend the real answers, and a cut keeps the beginning."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.history import SAFE_TOKENS, TokenHistory, WordHistory
from workloads.trace import Round

rounds = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(300, 900), max_size=9), st.none() | st.floats(0, 1)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=30)
@given(rounds)
def test_a_prompt_of_ids_is_what_is_kept_and_the_increment(drawn: list[tuple[int, list[int], float | None]]) -> None:
    history, context = TokenHistory(SAFE_TOKENS), list[int]()
    for index, (incr_tokens, answer, share) in enumerate(drawn):
        keep = None if share is None else int(share * len(context))
        kept = context[:keep]
        item = Round(incr_tokens=incr_tokens, output_tokens=1, keep_tokens=keep)
        prompt = history.prompt(item, f"seed/{index}")["prompt"]
        assert prompt[: len(kept)] == kept
        new = prompt[len(kept) :]
        assert len(new) == incr_tokens
        assert all(SAFE_TOKENS.first <= token <= SAFE_TOKENS.last for token in new)
        history.answered("", answer)
        context = prompt + answer
        assert history.length_tokens == len(context)


@settings(max_examples=30)
@given(rounds)
def test_messages_take_turns_and_count_as_the_trace_does(drawn: list[tuple[int, list[int], float | None]]) -> None:
    history, length = WordHistory(chat=True), 0
    text = WordHistory(chat=False)
    for index, (incr_tokens, answer, share) in enumerate(drawn):
        keep = None if share is None else int(share * length)
        item = Round(incr_tokens=incr_tokens, output_tokens=len(answer) or 1, keep_tokens=keep)
        messages = history.prompt(item, str(index))["messages"]
        assert text.prompt(item, str(index))["prompt"] == "".join(message["content"] for message in messages)
        assert messages[-1]["role"] == "user"
        assert len(messages[-1]["content"].split()) == incr_tokens
        for each in (history, text):
            each.answered(" word" * item.output_tokens, [])
        length = (length if keep is None else keep) + incr_tokens + item.output_tokens
        assert history.length_tokens == text.length_tokens == length


def test_a_cut_goes_between_words() -> None:
    history = WordHistory(chat=True)
    history.prompt(Round(incr_tokens=4, output_tokens=2, text="one two three four"), "")
    history.answered(" five six", [])
    messages = history.prompt(Round(incr_tokens=1, output_tokens=1, keep_tokens=3, text="new"), "")["messages"]
    assert [message["content"] for message in messages] == ["one two", "new"]
