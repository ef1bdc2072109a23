"""Our digests of pages are those of SGLang's extension."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.engines.sglang_plugin import get_hash

U32 = st.integers(0, 2**32 - 1)
TOKENS = st.one_of(
    st.lists(U32, max_size=40).map(lambda ids: array("I", ids)),
    st.lists(U32, max_size=40).map(lambda ids: array("q", ids)),
)


def test_pages_are_chained_from_the_prior_digest() -> None:
    prior = hashlib.sha256(b"before").digest()
    first = hashlib.sha256(prior + array("I", [1, 2]).tobytes()).digest()
    second = hashlib.sha256(first + array("I", [3]).tobytes()).hexdigest()
    assert get_hash(array("q", [1, 2, 3]), 3, 1, False, prior, 2) == [first.hex(), second]


@pytest.fixture(scope="module")
def native() -> Any:
    loader = pytest.importorskip("sglang.srt.mem_cache.cpp_utils.native_hash")
    try:
        return loader._load_native_hash_module()
    except RuntimeError as error:
        pytest.skip(f"SGLang's extension cannot be built here: {error.__cause__}")


@pytest.mark.slow
@given(
    tokens=TOKENS,
    prior=st.none() | st.binary(min_size=32, max_size=32),
    page_size=st.none() | st.integers(1, 9),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_digests_equal_those_of_the_extension(
    native: Any, tokens: array[int], prior: bytes | None, page_size: int | None
) -> None:
    arguments = (tokens, len(tokens), 1, False, prior, page_size)
    assert get_hash(*arguments) == native.get_hash(*arguments)
