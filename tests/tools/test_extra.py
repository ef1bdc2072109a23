"""`make clients` installs the packages of one extra."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.clients.environment import aiperf_program, clients_node_modules, clients_python
from tools.extra import packages_of

ROOT = Path(__file__).parents[2]


def test_the_packages_of_an_extra_are_printed_without_those_of_the_project() -> None:
    script = [sys.executable, "-I", "tools/extra.py", "clients"]
    printed = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == packages_of("clients")
    assert any(line.startswith("litellm>=") for line in printed)
    assert not any(line.startswith("ai-dynamo") for line in printed)


def test_the_clients_run_in_the_environment_of_make_if_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLIENTS_PYTHON", raising=False)
    assert clients_python(tmp_path) == sys.executable
    python = tmp_path / "clients" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert clients_python(tmp_path) == str(python)
    monkeypatch.setenv("CLIENTS_PYTHON", "/other/python")
    assert clients_python(tmp_path) == "/other/python"


def test_aiperf_and_the_packages_of_npm_are_those_of_make_or_those_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CLIENTS_AIPERF", "CLIENTS_NODE_MODULES"):
        monkeypatch.delenv(name, raising=False)
    assert aiperf_program(tmp_path) is None
    program = tmp_path / "aiperf" / "bin" / "aiperf"
    program.parent.mkdir(parents=True)
    program.touch()
    assert aiperf_program(tmp_path) == str(program)
    assert clients_node_modules(tmp_path) == tmp_path / "clients-js" / "node_modules"
    monkeypatch.setenv("CLIENTS_AIPERF", "/other/aiperf")
    monkeypatch.setenv("CLIENTS_NODE_MODULES", "/other/node_modules")
    assert aiperf_program(tmp_path) == "/other/aiperf"
    assert clients_node_modules(tmp_path) == Path("/other/node_modules")
