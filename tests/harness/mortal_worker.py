"""`python -m workers` with a modelled engine that ends its process as soon as it takes a prompt with `DEADLY_TOKEN`."""

import os
import signal

from ampd.child_process import exit_now
from workers.__main__ import main
from workers.engines.base import EngineRequest
from workers.engines.modelled import ModelledEngine
from workers.engines.modelled_request import ActiveRequest

DEADLY_TOKEN = 66

_submit = ModelledEngine._submit


def _die(engine: ModelledEngine, request: EngineRequest) -> ActiveRequest:
    if DEADLY_TOKEN in request.token_ids:
        os.kill(os.getpid(), signal.SIGKILL)
    return _submit(engine, request)


if __name__ == "__main__":
    ModelledEngine._submit = _die
    exit_now(main())
