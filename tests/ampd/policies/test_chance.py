"""Random choices."""

from __future__ import annotations

import random

from ampd.policies.base import any_of


def test_a_choice_is_that_of_python() -> None:
    ours, pythons = random.Random(7), random.Random(7)
    for count in [*range(1, 40), 1000] * 5:
        options = range(count)
        assert any_of(options, ours) == pythons.choice(options)
    assert ours.random() == pythons.random()
