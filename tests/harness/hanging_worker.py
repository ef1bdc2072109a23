"""`python -m workers` with a modelled engine that hangs in its first decode step, and a worker that waits a second."""

import asyncio

from ampd.child_process import exit_now
from workers.__main__ import main
from workers.engines import supervised
from workers.engines.modelled import ModelledEngine


async def _hang(_engine: ModelledEngine) -> None:
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    ModelledEngine._decode_step = _hang
    supervised.STALL_FLOOR_S = 1.0
    exit_now(main())
