"""The control channel when the engine's process has gone."""

import asyncio
from contextlib import suppress

import pytest

from workers.kv.control import ControlLink, Message
from workers.kv.keeper_channel import KeeperChannel


async def test_a_message_to_a_process_that_has_gone_fails_at_once() -> None:
    events: list[Message] = []
    link = ControlLink(events.append)
    channel = KeeperChannel(link.address)
    try:
        channel.send({"event": "hello"})
        await link.hello(5.0)
        await link.send({"op": "begin"})
        channel.close()
        async with asyncio.timeout(5):
            with suppress(ConnectionError):
                while True:
                    await link.send({"op": "begin"})
                    await asyncio.sleep(0.01)
            with pytest.raises(ConnectionError, match="has gone"):
                await link.call({"op": "held"}, timeout_s=60.0)
    finally:
        await link.close()
