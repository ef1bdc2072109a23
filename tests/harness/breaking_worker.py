"""`python -m workers` with a modelled engine that breaks at its first request."""

import os
import sys
from typing import NoReturn

from workers.__main__ import main
from workers.engines.modelled import ModelledEngine


def _break(_engine: ModelledEngine) -> NoReturn:
    raise ZeroDivisionError("no more")


if __name__ == "__main__":
    ModelledEngine._admit = _break  # type: ignore[method-assign]
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
