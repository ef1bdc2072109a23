"""The end of a process that has run Dynamo."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def exit_now(code: int) -> NoReturn:
    """End the process after its output is written. Everything else must be released already.

    The interpreter's teardown is left out, because Dynamo's runtime threads may outlive it and crash in it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
