"""The replayed load of a soak: it rests with all sessions ended, and goes on."""

import asyncio
import time
from typing import Any

from ampd.tiny_model import tiny_model_path
from benchmarks.faults.load import Client, Ending, RoundResult
from benchmarks.faults.tokens import ExpectedTokens, expected_tokens
from benchmarks.soak.replay import ReplayedLoad
from tests.waiting import until


class ServedAtOnce(Client):
    """A client whose rounds all complete."""

    async def send(self, session_id: str, *_: Any, is_final: bool = False, **_options: Any) -> RoundResult:
        result = RoundResult(session_id, time.monotonic(), ending=Ending.COMPLETED, is_final=is_final)
        self.results.append(result)
        await asyncio.sleep(0)
        return result


async def test_the_load_rests_without_an_open_session_and_goes_on() -> None:
    expected: ExpectedTokens = expected_tokens(tiny_model_path())
    client = ServedAtOnce(list, expected, 20.0)
    load = ReplayedLoad(client, expected, agents=3, seed=0)
    await until(lambda: len(client.open_sessions()) == 3, timeout_s=60.0)
    await load.rest()
    assert client.open_sessions() == []
    rested = len(client.results)
    await asyncio.sleep(0)
    assert len(client.results) == rested
    load.go_on()
    await until(client.open_sessions, timeout_s=60.0)
    await load.stop()
    assert client.open_sessions() == []
    await client.close()
