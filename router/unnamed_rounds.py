"""Rounds of clients that name no session. Each is a session of its own, without affinity and without history."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

_WARN_AT = 20
"""A client that tries the graph out needs no session. One that sends this many rounds is probably an agent."""


class UnnamedRounds:
    """Counts rounds without a session, and warns once.

    Attributes:
        count: since the start of the process.
    """

    def __init__(self) -> None:
        self.count = 0
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` at each such round from now on."""
        self._listeners.append(listener)

    def add(self) -> None:
        self.count += 1
        for listener in self._listeners:
            listener()
        if self.count == _WARN_AT:
            log.warning(
                "%d rounds came without a session: each is prefilled from its first token, on any worker. If they are "
                "an agent's, send the header x-dynamo-session-id (docs/clients.md); this is logged once",
                self.count,
            )
