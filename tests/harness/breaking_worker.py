"""`python -m workers` with a modelled engine that breaks at its first request."""

from typing import NoReturn

from ampd.child_process import exit_now
from workers.__main__ import main
from workers.engines.modelled import ModelledEngine


def _break(_engine: ModelledEngine) -> NoReturn:
    raise ZeroDivisionError("no more")


if __name__ == "__main__":
    ModelledEngine._admit = _break
    exit_now(main())
