"""Published prefixes that prompts begin with: found by their keys once, and by one digest afterwards."""

from collections.abc import Sequence

from ampd.keys import pack_tokens, page_keys
from ampd.serving.shared_prefixes import prefix_key
from router.unplaced_round import KnownPrefixes

PAGE = 16
SYSTEM = list(range(64))


def published(token_ids: list[int], *lengths: int, tenant: str = "") -> dict[str, int]:
    keys = page_keys(token_ids, PAGE, tenant=tenant)
    return {prefix_key(keys[tokens // PAGE - 1]): tokens for tokens in lengths}


class Prompts:
    """Asks for prompts, and notes for how many tokens pages were hashed."""

    def __init__(self) -> None:
        self.known = KnownPrefixes()
        self.hashed: list[int] = []

    def ask(self, token_ids: list[int], there: dict[str, int], tenant: str = "") -> list[int]:
        def keys(tokens: int) -> Sequence[bytes]:
            self.hashed.append(tokens)
            return page_keys(token_ids[:tokens], PAGE, tenant=tenant)

        return sorted(self.known.of(pack_tokens(token_ids), tenant, there, PAGE, keys).values())


def test_a_prefix_is_hashed_by_pages_until_a_prompt_begins_with_it() -> None:
    prompts, there = Prompts(), published(SYSTEM, 32, 64)
    assert prompts.ask([9] * 100, there) == []
    assert prompts.hashed == [64, 64]
    assert prompts.ask([*SYSTEM, 1, 2], there) == [32, 64]
    prompts.hashed.clear()
    assert prompts.ask([*SYSTEM, 3], there) == [32, 64]
    assert prompts.ask([*SYSTEM[:40], *[9] * 40], there) == [32]
    assert prompts.ask([9] * 100, there) == []
    assert prompts.ask(SYSTEM[:20], there) == []
    assert prompts.hashed == []


def test_tenants_find_their_own_prefixes_only() -> None:
    prompts, there = Prompts(), published(SYSTEM, 64, tenant="acme")
    assert prompts.ask(SYSTEM, there) == []
    assert prompts.ask(SYSTEM, there, tenant="acme") == [64]
    assert prompts.ask(SYSTEM, there) == []


def test_lengths_that_no_worker_of_this_graph_publishes_find_nothing() -> None:
    key = next(iter(published(SYSTEM, 64)))
    for tokens in (0, 1, 63, 1 << 50):
        assert Prompts().ask(SYSTEM, {key: tokens}) == []
