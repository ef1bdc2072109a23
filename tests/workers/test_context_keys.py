"""The keys are those of `page_keys`, whatever is known, and only new pages are hashed."""

import random
from array import array
from hashlib import sha256
from typing import Any

import pytest

import ampd.keys
from ampd.keys import page_keys
from workers.round_service import ContextKeys

PAGE = 4


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The parents of the pages that were hashed."""
    parents: list[bytes] = []

    def counted(data: bytes) -> Any:
        parents.append(data)
        return sha256(data)

    monkeypatch.setattr(ampd.keys, "sha256", counted)
    return parents


def of(known: ContextKeys, tokens: list[int], session: str = "s", tenant: str = "") -> list[bytes]:
    return known.of(session, array("I", tokens), PAGE, tenant=tenant)


def test_a_longer_prompt_is_hashed_from_the_end_of_the_one_before(hashed: list[bytes]) -> None:
    known, prompt = ContextKeys(), list(range(10))
    for tokens, pages in ((10, 2), (10, 0), (11, 0), (12, 1), (33, 5)):
        prompt = list(range(tokens))
        hashed.clear()
        keys = of(known, prompt)
        assert len(hashed) == pages
        assert keys == page_keys(prompt, PAGE, tenant="")


@pytest.mark.parametrize("changed", [[9, *range(1, 20)], [*range(15), 99, *range(16, 20)], list(range(7)), []])
def test_a_rewritten_or_cut_prompt_takes_over_no_key(changed: list[int]) -> None:
    known = ContextKeys()
    of(known, list(range(16)))
    assert of(known, changed) == page_keys(changed, PAGE, tenant="")
    assert of(known, list(range(20))) == page_keys(list(range(20)), PAGE, tenant="")


def test_another_tenant_or_session_takes_over_no_key(hashed: list[bytes]) -> None:
    known, prompt = ContextKeys(), list(range(16))
    of(known, prompt)
    assert of(known, prompt, tenant="acme") == page_keys(prompt, PAGE, tenant="acme")
    hashed.clear()
    of(known, prompt, "other")
    assert len(hashed) == 4


def test_a_forgotten_session_is_hashed_again(hashed: list[bytes]) -> None:
    known, prompt = ContextKeys(), list(range(16))
    of(known, prompt)
    known.forget("s")
    known.forget("never known")
    hashed.clear()
    of(known, prompt)
    assert len(hashed) == 4


def test_the_sessions_that_were_used_last_are_kept(hashed: list[bytes]) -> None:
    known, prompt = ContextKeys(most_pages=8), list(range(16))
    for session in ("a", "b", "a", "c"):
        of(known, prompt, session)
    hashed.clear()
    of(known, prompt, "a")
    of(known, prompt, "c")
    assert not hashed
    of(known, prompt, "b")
    assert len(hashed) == 4
    hashed.clear()
    for _ in range(2):
        of(known, list(range(100, 140)), "too long")
    assert len(hashed) == 20


def test_keys_of_random_changes_are_those_of_the_tokens() -> None:
    rng, known = random.Random(5), ContextKeys(most_pages=60)
    prompts: dict[str, list[int]] = {name: [] for name in "abcdef"}
    for _ in range(2000):
        name = rng.choice("abcdef")
        prompt = prompts[name]
        if prompt and rng.random() < 0.2:
            prompt[rng.randrange(len(prompt))] += 1
        if rng.random() < 0.1:
            del prompt[rng.randrange(len(prompt) + 1) :]
        prompt.extend(rng.randrange(1 << 32) for _ in range(rng.randrange(12)))
        tenant = rng.choice(["", "acme"])
        assert of(known, prompt, name, tenant) == page_keys(prompt, PAGE, tenant=tenant)
        if rng.random() < 0.05:
            prompts[name] = []


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_a_token_beyond_32_bits_is_an_error_and_changes_nothing(token: int) -> None:
    known, prompt = ContextKeys(), list(range(16))
    of(known, prompt)
    with pytest.raises(OverflowError):
        of(known, [*prompt, token, 1, 2, 3])
    assert of(known, prompt) == page_keys(prompt, PAGE, tenant="")
