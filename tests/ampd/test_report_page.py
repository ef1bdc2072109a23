"""The script of reports."""

import shutil
import subprocess
from importlib.resources import files

import pytest


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("name", ["charts.js", "uplot.js"])
def test_the_scripts_of_a_report_can_be_parsed(name: str) -> None:
    path = str(files("ampd.reports").joinpath("templates", name))
    subprocess.run(["node", "--check", path], check=True, capture_output=True)
