"""The interpreter that has the packages of the clients. They do not fit beside SGLang."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "CLIENTS_PYTHON"


def clients_python(environment: Path = Path(sys.prefix)) -> str:
    """The interpreter that CLIENTS_PYTHON names, else that of `make clients`, else this one.

    Args:
        environment: the virtual environment in which `make clients` has made another one.
    """
    own = environment / "clients" / "bin" / "python"
    return os.environ.get(VARIABLE) or str(own if own.is_file() else sys.executable)
