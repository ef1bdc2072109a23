"""The kernel's inotify instances, of which a user has few, and each process with Dynamo takes some."""

from __future__ import annotations

import time

from ampd.cli.serve.settings import WATCHES_PER_PROCESS, used_watches, watch_limit

_PATIENCE_S = 20.0


def wait_for_watches(processes: int) -> None:
    """Wait until so many processes can watch files, because other graphs of this machine may end soon.

    A process without an instance finds no other process, and waits for ever without a word. After a while the test
    tries it all the same: a small graph may have enough.
    """
    give_up_s = time.monotonic() + _PATIENCE_S
    while (limit := watch_limit()) and used_watches() + processes * WATCHES_PER_PROCESS > limit:
        if time.monotonic() > give_up_s:
            return
        time.sleep(1.0)
