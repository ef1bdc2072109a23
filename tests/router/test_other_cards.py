"""A coordinator registers another context when no other one has the old one registered any more."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ampd.types import CoordinatorView, Slo
from router.model_card import ModelCard, OtherCards
from tests.memory_store import MemoryStore

OTHER = CoordinatorView("other", Slo(1.0, 0.1), context_tokens=65536)


async def silent() -> None:
    """Publish nothing."""


@pytest.mark.parametrize("tokens", [0, 400])
async def test_it_waits_until_the_others_have_taken_their_cards_away(tokens: int) -> None:
    store = MemoryStore()
    await store.publish_coordinator(replace(OTHER, coordinator_id="own"), 60.0)
    await store.publish_coordinator(OTHER, 60.0)
    waiting = asyncio.create_task(OtherCards(store, "own", silent, poll_s=0.0).until_none_differs(400))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    await store.publish_coordinator(replace(OTHER, context_tokens=tokens), 60.0)
    await waiting


async def test_it_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    await store.publish_coordinator(OTHER, 60.0)
    await OtherCards(store, "own", silent, timeout_s=0.01).until_none_differs(400)
    assert "coordinators other have still registered the model with another context" in caplog.text


async def test_the_others_know_a_card_before_the_frontends_do() -> None:
    """Otherwise another coordinator could register a different one between the two."""
    seen: list[tuple[str, int]] = []

    class Card(ModelCard):
        def __init__(self) -> None:
            self.context_length = 400
            self._registered = None

        async def _register(self, endpoint: Any, context_tokens: int | None) -> None:  # noqa: ARG002
            seen.append(("frontends", self.registered_tokens))

    card = Card()

    async def publish() -> None:
        seen.append(("others", card.registered_tokens))

    await card.register(None, None, OtherCards(MemoryStore(), "own", publish))
    assert seen == [("others", 400), ("frontends", 400)]
