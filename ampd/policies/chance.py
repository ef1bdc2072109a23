"""Random choices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

OptionT = TypeVar("OptionT")


def any_of(options: Sequence[OptionT], rng: random.Random) -> OptionT:
    """One of some options, each with the same chance.

    It is the one that `rng.choice` gives in Python 3.11 to 3.14, where that is an interpreted function.

    Args:
        options: not empty.
    """
    bits = len(options).bit_length()
    place = rng.getrandbits(bits)
    while place >= len(options):
        place = rng.getrandbits(bits)
    return options[place]
