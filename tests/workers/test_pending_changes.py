"""What a worker has still to publish: no change is lost, and old news is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ampd.state.known_worker import QUEUE_GRACE_S
from tests.virtual_time import run_virtually
from workers.pending_changes import PendingChanges

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return lambda scenario: run_virtually(scenario, monkeypatch, "workers.pending_changes")


def test_a_change_ends_the_wait_and_samples_do_not(run: Run) -> None:
    async def scenario() -> None:
        changes = PendingChanges()
        changes.sampled()
        assert changes.has_samples
        assert not await changes.wait_changed(1.0)
        for change in (changes.changed, lambda: changes.held("s", 16), lambda: changes.finished("t")):
            changes.clear()
            waiting = asyncio.create_task(changes.wait_changed(60.0))
            await asyncio.sleep(1.0)
            assert not waiting.done()
            change()
            assert await waiting
        assert not changes.has_samples

    run(scenario())


def test_growth_during_a_round_is_a_sample(run: Run) -> None:
    async def scenario() -> None:
        changes = PendingChanges()
        changes.held("s", 16, is_running=True)  # a session that is new here
        assert await changes.wait_changed(1.0)
        changes.clear()
        changes.held("s", 32, is_running=True)
        assert changes.has_samples
        assert changes.held_tokens == {"s": 32}
        assert not await changes.wait_changed(1.0)
        for tokens, is_running in ((16, True), (32, False), (0, True)):
            changes.held("s", tokens, is_running=is_running)
            assert await changes.wait_changed(1.0)
            changes.clear()

    run(scenario())


def test_what_is_held_already_is_no_change(run: Run) -> None:
    async def scenario() -> None:
        changes = PendingChanges()
        changes.held("s", 16)
        changes.held("t", 32)
        changes.clear()
        changes.held("s", 16)
        changes.held("unknown", 0)
        assert not await changes.wait_changed(1.0)
        changes.held("s", 0)
        assert await changes.wait_changed(1.0)
        assert changes.held_tokens == {"t": 32}

    run(scenario())


def test_finished_prefills_are_reported_until_they_are_known_or_old(run: Run) -> None:
    async def scenario() -> None:
        changes = PendingChanges()
        for number in range(1200):
            changes.finished(str(number))
        reported: list[str] = []
        while batch := changes.finished_tasks():
            assert len(batch) <= 500
            assert batch == changes.finished_tasks(), "a report that failed is repeated"
            reported += batch
            changes.clear()
            changes.forget_finished(batch)
            assert await changes.wait_changed(1.0) == (len(reported) < 1200), "the rest follows at once"
        assert reported == [str(number) for number in range(1200)]
        changes.finished("old")
        await asyncio.sleep(QUEUE_GRACE_S + 0.1)
        changes.finished("new")
        assert changes.finished_tasks() == ["new"]

    run(scenario())
