"""Page keys: a chain over all tokens, and the same chain as SGLang's."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.keys import KEY_BYTES, page_keys

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=80)
TENANTS = st.text(max_size=20)


@given(TOKENS, st.sampled_from([1, 4, 16]))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(tokens: list[int], page_size: int) -> None:
    keys = page_keys(tokens, page_size, tenant="")
    assert len(keys) == len(tokens) // page_size
    assert all(len(key) == KEY_BYTES for key in keys)
    prefix_keys = page_keys(tokens[: len(tokens) // 2], page_size, tenant="")
    assert prefix_keys == keys[: len(tokens) // 2 // page_size]
    assert page_keys(tokens, page_size, prefix_keys, tenant="") == keys
    assert page_keys(tokens[: len(tokens) // 2], page_size, keys, tenant="") == prefix_keys


@given(TOKENS.filter(bool), st.data())
def test_a_changed_token_changes_its_page_and_all_after_it(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    before, after = page_keys(tokens, 4, tenant=""), page_keys(changed, 4, tenant="")
    assert before[: at // 4] == after[: at // 4]
    assert not set(before[at // 4 :]) & set(after[at // 4 :])


@given(TOKENS, TENANTS, TENANTS)
def test_tenants_have_no_key_in_common(tokens: list[int], first: str, second: str) -> None:
    ours, theirs = (page_keys(tokens, 4, tenant=tenant) for tenant in (first, second))
    assert ours == theirs if first == second else not set(ours) & set(theirs)


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_the_chain_is_sglangs() -> None:
    pytest.importorskip("sglang")
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    @settings(deadline=None)
    @given(TOKENS, TENANTS)
    def check(tokens: list[int], tenant: str) -> None:
        full = len(tokens) // 4 * 4
        key = RadixKey(array("q", tokens[:full]), None, cache_salt=tenant or None)
        theirs = get_storage_hash_str(key, None, page_size=4)
        assert [bytes.fromhex(name) for name in theirs] == page_keys(tokens, 4, tenant=tenant)

    check()
