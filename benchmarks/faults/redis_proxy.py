"""A TCP proxy before Redis, which can delay every answer and lead new connections to another server.

Only the graph's traffic passes it, because the harness asks the servers themselves. So it sees what a fault of Redis
does to the graph.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.faults.redis_server import PASSWORD, USER
from tests.harness.tcp_proxy import TcpProxy

_ERROR = re.compile(rb"(?:^|\r\n)-([A-Z]+ [^\r\n]*)")
_WORD = re.compile(rb"(?:^|: -)([A-Z]+) ")
"""Of an error. That of a script has the word of the command's own error behind its line number."""

_NO_PERMISSION = b"The user executing the script can't run"
"""A script's error has no word of its own for NOPERM."""


def refusals(data: bytes) -> list[str]:
    """The words of the error answers among `data`."""
    found = []
    for error in _ERROR.findall(data):
        found += [word.decode() for word in _WORD.findall(error)]
        found += ["NOPERM"] * (_NO_PERMISSION in error)
    return found


@dataclass
class Seen:
    """What has passed since the latest fault.

    Attributes:
        refusals: error answers, by their word. delayed: answers that the proxy has held back.
        broken: connections that a server has closed or not taken. opened: new ones, by the port of the server.
        waiting_since_s: connection -> when its oldest command without an answer passed.
    """

    refusals: Counter[str] = field(default_factory=Counter)
    delayed: int = 0
    broken: int = 0
    opened: Counter[int] = field(default_factory=Counter)
    waiting_since_s: dict[asyncio.StreamWriter, float] = field(default_factory=dict)
    _longest_s: float = 0.0

    def command(self, client: asyncio.StreamWriter) -> None:
        """A client has sent something."""
        self.waiting_since_s.setdefault(client, time.monotonic())

    def answer(self, client: asyncio.StreamWriter, data: bytes, delay_s: float) -> None:
        """A client gets something."""
        self.end(client)
        self.delayed += delay_s > 0
        self.refusals.update(refusals(data))

    def end(self, client: asyncio.StreamWriter) -> None:
        """A client waits no more, perhaps because it has gone."""
        since_s = self.waiting_since_s.pop(client, time.monotonic())
        self._longest_s = max(self._longest_s, time.monotonic() - since_s)

    @property
    def longest_wait_s(self) -> float:
        """For an answer, those included that go on."""
        now_s = time.monotonic()
        return max(self._longest_s, *(now_s - since_s for since_s in self.waiting_since_s.values()), 0.0)


class RedisProxy(TcpProxy):
    """One address for whichever server is the master.

    Attributes:
        seen: what has passed; `forget` begins a new one.
    """

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self.seen = Seen()

    @property
    def url(self) -> str:
        return f"redis://{USER}:{PASSWORD}@127.0.0.1:{self.port}/0"

    def forget(self) -> None:
        """Begin to look at what passes from now on."""
        self.seen = Seen()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await super()._serve(reader, writer)
        except OSError:  # no server: the client sees a connection that ends at once
            self.seen.broken += 1

    async def _lead(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        port, begun = await super()._lead(reader)
        self.seen.opened[port] += 1
        return port, begun

    def _passed(self, client: asyncio.StreamWriter, data: bytes, *, is_answer: bool) -> None:
        if not data:
            self.seen.end(client)
            self.seen.broken += is_answer  # the server has closed it
        elif is_answer:
            self.seen.answer(client, data, self.delay_s)
        else:
            self.seen.command(client)
