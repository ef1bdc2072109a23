"""Which context a prompt goes on from, in a session with several of them and without a session."""

from __future__ import annotations

from typing import Any

import pytest

from ampd.keys import is_branch_of, is_session_key, pack_tokens, session_key
from ampd.state.store import Binding, SessionLimits
from ampd.types import BreakingSession, Slo
from router.request import RoundRequest
from router.session_branches import LEAST_TOKENS, Found, SessionBranches
from router.session_memory import SessionMemory, SessionOwner

LIMITS = SessionLimits(ttl_s=1800.0, first_ttl_s=300.0)
NAME = session_key("", "s")


def tokens(tag: int, count: int = 200) -> list[int]:
    return [tag * 1000 + number for number in range(count)]


class Site:
    """A coordinator's memory, with a clock of its own."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.now_s = 0.0
        self.sessions = SessionMemory(max_bytes, LIMITS, lambda: self.now_s)
        self.branches = SessionBranches(self.sessions, LIMITS.new_ttl_s, lambda: self.now_s)

    def begin(self, prompt: list[int], name: str | None = "s", tenant: str = "", **fields: Any) -> Found:
        key = f"single-{self.now_s}-{id(prompt)}" if name is None else session_key(tenant, name)
        options: dict[str, Any] = {"max_tokens": 9, "choices": 1, "wants_record": False, "uncarried": None, **fields}
        slo = Slo(1.0, 0.1)
        return self.branches.begin(RoundRequest(key, name, tenant, False, pack_tokens(prompt), slo, **options))

    def end(self, found: Found, output: list[int], worker_id: str = "d1") -> None:
        request = found.request
        if not request.ends_session:
            owner = SessionOwner(request.client_session_id or "", request.tenant, self.now_s)
            binding, context = Binding(request.session_id, worker_id, 1), request.prompt + pack_tokens(output)
            self.sessions.remember(binding, context, prompt_tokens=request.prompt_tokens, owner=owner)
        self.branches.end(found, worker_id)
        self.now_s += 1.0

    def round(self, prompt: list[int], name: str | None = "s", worker_id: str = "d1", **fields: Any) -> Found:
        """A round with the output 7, 8, 9."""
        found = self.begin(prompt, name, **fields)
        self.end(found, [7, 8, 9], worker_id)
        return found


def key(found: Found) -> str:
    return found.request.session_id


def test_a_session_with_one_context_is_one_branch() -> None:
    site = Site()
    prompt: list[int] = []
    for number in range(4):
        prompt += [*tokens(number), 7, 8, 9]
        found = site.round(prompt)
        assert (key(found), found.fork, found.breaks_at_tokens) == (NAME, None, None)
        assert found.goes_on == bool(number)
    assert site.branches.of(NAME) == [NAME]


def test_contexts_that_take_turns_are_branches_of_their_own() -> None:
    site = Site()
    prompts = {tag: tokens(tag) for tag in (1, 2, 3)}
    first = {tag: key(site.round(prompt)) for tag, prompt in prompts.items()}
    assert len(set(first.values())) == 3
    for number in range(3):
        for tag, prompt in prompts.items():
            prompt += [7, 8, 9, *tokens(10 * tag + number)]
            found = site.round(prompt)
            assert (key(found), found.breaks_at_tokens) == (first[tag], None)
    assert {*site.branches.of(first[2])} == {*first.values()}
    assert all(is_session_key(name) and is_branch_of(name, NAME) for name in first.values())
    assert not is_branch_of(session_key("other", "s"), NAME)


def test_contexts_of_a_name_that_begin_at_once_are_told_apart() -> None:
    site = Site()
    running = [site.begin(tokens(tag)) for tag in range(1, 7)]
    for found in running:
        site.end(found, [7])
    assert len({key(found) for found in running}) == 6
    assert site.branches.breaking() == []
    assert [key(site.round([*tokens(tag), 7, *tokens(9)])) for tag in range(1, 7)] == [*map(key, running)]


def test_a_fork_is_a_branch_that_begins_where_its_parent_is() -> None:
    site = Site()
    root = [*tokens(1), 7, 8, 9, *tokens(2)]
    site.round(tokens(1))
    site.round(root, worker_id="d2")
    fork = site.round([*root[:300], *tokens(5)])
    assert fork.fork is not None
    assert (fork.fork.worker_id, fork.fork.tokens, fork.breaks_at_tokens) == ("d2", 300, 300)
    assert fork.goes_on
    assert key(site.round([*root, 7, 8, 9, *tokens(3)])) == NAME
    assert key(site.round([*root[:300], *tokens(5), 7, 8, 9, *tokens(6)])) == key(fork) != NAME


@pytest.mark.parametrize("written", [[1, 1], [], tokens(7, 90)])
def test_the_last_output_may_come_back_in_other_words(written: list[int]) -> None:
    """Templates leave out thoughts, and clients write the arguments of calls anew. The end of the prompt may differ."""
    site = Site()
    site.end(site.begin(tokens(1)), tokens(7, 100))
    found = site.round([*tokens(1)[:-4], *written, *tokens(2)])
    assert (key(found), found.breaks_at_tokens) == (NAME, None)


def test_a_few_pages_are_not_worth_a_branch() -> None:
    site = Site()
    site.round(tokens(1, LEAST_TOKENS - 4))
    assert key(site.round(tokens(2))) == NAME
    assert key(site.round(tokens(3, LEAST_TOKENS))) != NAME


def test_a_prefix_that_breaks_in_every_round_is_shown_and_leaves_few_branches() -> None:
    site = Site()
    keys = []
    for number in range(20):
        found = site.round([*tokens(1, 20), number, *tokens(2, 400)])
        keys.append(key(found))
        assert site.branches.breaking() == ([BreakingSession(NAME, number, 20, 424)] if number >= 3 else []), (
            "the rounds in a row, and where they depart"
        )
    assert len(set(keys)) < 10
    site.now_s += 61.0
    assert site.branches.breaking() == []


def test_a_session_whose_prefix_holds_again_is_shown_no_longer() -> None:
    site = Site()
    for number in range(5):
        site.round([number, *tokens(2)])
    assert site.branches.breaking()
    site.round([4, *tokens(2), 7, 8, 9, 1])
    assert site.branches.breaking() == []


def test_a_context_that_is_rewritten_in_each_round_goes_on_from_the_nearest_one() -> None:
    site = Site()
    kept = tokens(1, 400)
    keys = [key(site.round([*kept, *tokens(number + 2)])) for number in range(12)]
    assert len(set(keys)) < 10
    assert keys[-1] == keys[-2] != keys[0], "the one before has more of it than the first one"


def test_all_branches_end_together_and_are_forgotten_with_the_memory() -> None:
    site = Site()
    other = [key(site.round(tokens(tag))) for tag in (1, 2)][1]
    site.branches.forget(other)
    assert len(site.sessions) == 0
    assert site.branches.of(NAME) == [NAME]
    assert key(site.round(tokens(2))) == NAME
    small = Site(max_bytes=3000)
    for tag in range(50):
        small.round(tokens(tag), name=f"s{tag}")
    assert len(small.branches._trees) == len(small.branches._root_of) == len(small.sessions)


def test_a_round_that_was_refused_leaves_nothing() -> None:
    site = Site()
    site.branches.end(site.begin(tokens(1)), None)
    assert not site.branches._trees
    assert not site.branches._root_of


def test_an_announcement_begins_no_branch() -> None:
    site = Site()
    site.round(tokens(1))
    assert key(site.begin(tokens(2), max_tokens=0)) == NAME


# -- rounds that name nothing


def test_a_prompt_that_grows_is_a_session() -> None:
    site = Site()
    prompts = {tag: tokens(tag) for tag in (1, 2)}
    for prompt in prompts.values():
        found = site.round(prompt, None, worker_id="d2")
        assert not found.request.is_named
    seen = []
    for number in range(3):
        for tag, prompt in prompts.items():
            prompt += [7, 8, 9, *tokens(10 * tag + number)]
            found = site.round(prompt, None)
            assert found.request.is_named
            assert not found.request.ends_session
            seen.append((tag, key(found), found.fork and (found.fork.worker_id, found.fork.tokens)))
    assert [fork for _, _, fork in seen] == [("d2", 200)] * 2 + [None] * 4
    assert len({each[:2] for each in seen}) == 2


def test_the_longest_prompt_counts() -> None:
    site = Site()
    site.round(tokens(1), None, worker_id="short")
    site.round([*tokens(1), *tokens(2)], None, worker_id="long")
    found = site.round([*tokens(1), *tokens(2), *tokens(3)], None)
    assert found.request.is_named


@pytest.mark.parametrize(
    ("first", "second", "fields"),
    [
        (tokens(1), [*tokens(1), *tokens(2)], {"tenant": "other"}),
        (tokens(1), [*tokens(1, 150), *tokens(2)], {}),
        (tokens(1, LEAST_TOKENS), [*tokens(1, LEAST_TOKENS), *tokens(2)], {}),
        (tokens(1), tokens(1, 198), {}),
        (tokens(1), tokens(1), {}),
        (tokens(1), [*tokens(1), *tokens(2)], {"continued_tokens": 3}),
    ],
)
def test_what_is_no_session(first: list[int], second: list[int], fields: dict[str, Any]) -> None:
    """Another tenant, another prompt, a few tokens, a shorter prompt, the same one, and the rest of an output."""
    site = Site()
    site.round(first, None)
    assert not site.round(second, None, **fields).request.is_named


def test_a_prompt_can_be_continued_once_and_for_a_while() -> None:
    site = Site()
    site.round(tokens(1), None)
    longer = [[*tokens(1), *tokens(tag)] for tag in (2, 3)]
    assert [site.round(prompt, None).request.is_named for prompt in longer] == [True, False]
    late = Site()
    late.round(tokens(1), None)
    late.now_s += LIMITS.new_ttl_s
    assert not late.round(longer[0], None).request.is_named


def test_prompts_with_an_equal_beginning_are_found_by_their_ends() -> None:
    site = Site()
    shared = tokens(1, 300)
    for tag in range(2, 6):
        site.round([*shared, *tokens(tag, 30)], None, worker_id=f"d{tag}")
    for tag in range(2, 6):
        fork = site.round([*shared, *tokens(tag, 30), *tokens(9)], None).fork
        assert fork is not None
        assert fork.worker_id == f"d{tag}"
