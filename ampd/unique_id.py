"""Ids that no other process and no other call gets. They cost a seventh of `uuid4`, because each round needs five.

They can be guessed from one another. So they name things (rounds, calls, tasks, requests of engines), and give nobody a
right. What must not be guessed is random each time: leases of pages, the numbers in the signatures of calls,
secrets.
"""

from __future__ import annotations

import os
import secrets
from itertools import count

_PREFIX_BYTES = 10
"""80 random bits. Of a million processes, two have the same with a probability of 4e-13."""

_prefix = ""
_numbers = count(1)


def unique_id() -> str:
    """32 hexadecimal digits, as of a `uuid4().hex`: random ones of this process, and a number of 48 bits."""
    return f"{_prefix}{next(_numbers):012x}"


def _begin() -> None:
    """Take a new prefix: at the start, and in a process that was forked, which would repeat its parent's ids."""
    global _prefix, _numbers
    _prefix, _numbers = secrets.token_hex(_PREFIX_BYTES), count(1)


_begin()
os.register_at_fork(after_in_child=_begin)
