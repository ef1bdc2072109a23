"""`python -m router` that is late when it registers its model again, as on a busy machine."""

import asyncio
from typing import Any

from ampd.child_process import exit_now
from router.__main__ import main
from router.model_card import ModelCard

LATE_S = 3.0

_unregister = ModelCard._unregister


async def _unregister_late(card: ModelCard, endpoint: Any) -> None:
    await asyncio.sleep(LATE_S)
    await _unregister(card, endpoint)


if __name__ == "__main__":
    ModelCard._unregister = _unregister_late
    exit_now(main())
