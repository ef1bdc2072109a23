"""Progress on stderr: a bar in a terminal, and elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

_BETWEEN_LINES_S = 10.0


class Progress(tqdm):  # type: ignore[type-arg]
    """A bar that is gone at its end, or lines for a log. `total`: None: it is not known."""

    # Without the bar's own thread, because processes are forked later too.
    monitor_interval = 0

    def __init__(self, label: str, total: int | None = None, unit: str = "it") -> None:
        super().__init__(desc=label, total=total, unit=unit, file=sys.stderr, disable=None, leave=False)
        self._label = label
        self._line_s = time.monotonic()

    def update(self, count: float | None = 1) -> bool | None:
        """Count what has been done since the last call."""
        if not self.disable:
            return super().update(count)
        self.n += count or 0
        if time.monotonic() - self._line_s >= _BETWEEN_LINES_S:
            self._line_s = time.monotonic()
            print(f"{self._label}: {self.n}" + (f" of {self.total}" if self.total else ""), file=sys.stderr, flush=True)
        return None
