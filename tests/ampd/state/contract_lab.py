"""What the tests of every store's promises share."""

from __future__ import annotations

from collections.abc import Awaitable

LONG_S = 60.0
SHORT_S = 0.05

HOSTILE_IDS = [
    "",
    " ",
    "two words",
    "{braces}",
    "}{",
    "line\nbreak\r\n",
    "nul\x00byte",
    "Zürich 東京 😀",
    "\"quotes\" \\ and 'more'",
    "x" * 1024,
    "1 d2",
]


async def is_falsy(answer: Awaitable[object]) -> bool:
    return not await answer
