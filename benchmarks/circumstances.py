"""What a measured table has to name: the commit, the day and the load of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.commit import commit


def circumstances() -> dict[str, str | float]:
    """They are read now, so before the measurement."""
    return {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "load": round(os.getloadavg()[0], 1)}


def in_words(now: Mapping[str, Any]) -> str:
    """As in `commit 0ab0efb, 2026-11-26, load 1.0 at the start`."""
    return f"commit {now['commit']}, {now['date']}, load {now['load']} at the start"
