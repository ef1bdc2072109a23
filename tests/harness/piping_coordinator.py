"""`python -m router` that hands no round on, so that all chunks pass it."""

from typing import Any

from ampd.child_process import exit_now
from router import frames
from router.__main__ import main


async def _start(_server: frames.FrameServer, _runtime: Any, _namespace: str) -> None:
    """Leave all requests to Dynamo's server."""


if __name__ == "__main__":
    frames.FrameServer.start = _start
    exit_now(main())
