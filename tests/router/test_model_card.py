"""A coordinator writes its model's card again where others may have deleted it."""

from __future__ import annotations

from typing import Any

import pytest

from router.model_card import ModelCard, OtherCards
from tests.memory_store import MemoryStore


class CountedCard(ModelCard):
    """Knows no model, and only counts."""

    def __init__(self) -> None:
        self.context_length = 400
        self._registered = None
        self.written: list[int | None] = []

    async def _register(self, endpoint: Any, context_tokens: int | None) -> None:  # noqa: ARG002
        self.written.append(context_tokens)


@pytest.mark.parametrize(("backend", "times"), [("file", 2), ("etcd", 1)])
async def test_a_card_is_written_again_where_a_standstill_would_have_deleted_it(
    backend: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", backend)
    card, store = CountedCard(), MemoryStore()

    async def publish() -> None:
        pass

    for _ in range(2):  # at the start, and with the first decode worker
        await card.register(None, None, OtherCards(store, "own", publish))
    assert card.written == [400] * times
