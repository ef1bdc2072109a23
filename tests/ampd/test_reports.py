"""What reports need from the machine."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_home_that_cannot_be_written_brings_no_warning() -> None:
    """Nobody writes below /proc, root neither."""
    unset = ("MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | {"HOME": "/proc"}
    script = [sys.executable, "-c", "import ampd.reports.page"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
