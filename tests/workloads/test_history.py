"""Contexts of replayed sessions: prompts extend the real answers, and a cut keeps the beginning."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.endpoint import SAFE_TOKENS, CommonStart, TokenHistory, WordHistory
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


def test_sessions_with_the_same_start_share_exactly_its_tokens() -> None:
    start = CommonStart(40, "system")
    item = Round(incr_tokens=64, output_tokens=4)
    prompts = [TokenHistory(SAFE_TOKENS, start).prompt(item, seed)["prompt"] for seed in ("a", "b")]
    assert [len(prompt) for prompt in prompts] == [64, 64]
    assert prompts[0][:40] == prompts[1][:40]
    assert prompts[0][40:] != prompts[1][40:]
    # A context that keeps nothing begins anew without it.
    history = TokenHistory(SAFE_TOKENS, start)
    history.prompt(item, "a")
    assert history.prompt(Round(incr_tokens=64, output_tokens=4, keep_tokens=0), "c")["prompt"][:40] != prompts[0][:40]


def test_a_start_of_words_is_the_system_message() -> None:
    start = CommonStart(3, "system")
    rounds = [Round(incr_tokens=5, output_tokens=1), Round(incr_tokens=3, output_tokens=1, text="real words")]
    chats = [WordHistory(True, start).prompt(rounds[0], seed)["messages"] for seed in ("a", "b")]
    assert [[message["role"] for message in messages] for messages in chats] == [["system", "user"]] * 2
    assert chats[0][0] == chats[1][0]
    assert [len(message["content"].split()) for message in chats[0]] == [3, 2]
    text = WordHistory(False, start)
    assert text.prompt(rounds[0], "a")["prompt"] == "".join(message["content"] for message in chats[0])
    assert text.length_tokens == 5
    # Real words have their own start, and a prompt is not a system message alone.
    assert WordHistory(True, start).prompt(rounds[1], "a")["messages"] == [{"role": "user", "content": "real words"}]
    only = WordHistory(True, CommonStart(5, "system")).prompt(rounds[0], "a")["messages"]
    assert [message["role"] for message in only] == ["user"]
