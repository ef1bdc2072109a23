"""Whether processes that a test started, or that these started, have ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.waiting import PATIENCE_S


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended, and that nobody has waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before it was opened, or before it was read
        return False


def wait_for(condition: Callable[[], object]) -> None:
    """As `tests.waiting.until`, where no event loop runs."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
