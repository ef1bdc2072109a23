"""The rounds that a coordinator serves are counted, however they end."""

import asyncio
from contextlib import suppress

from ampd.background_tasks import RoundsInProgress


async def test_it_is_drained_when_the_last_round_has_ended() -> None:
    rounds = RoundsInProgress()
    await asyncio.wait_for(rounds.drained(), 60.0)
    with rounds.round():
        with suppress(ValueError), rounds.round():
            assert len(rounds) == 2
            raise ValueError
        assert len(rounds) == 1
        draining = asyncio.create_task(rounds.drained())
        await asyncio.sleep(0)
        assert not draining.done()
    assert len(rounds) == 0
    await asyncio.wait_for(draining, 60.0)
