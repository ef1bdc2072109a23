"""Compiled modules decide what the interpreted ones decide, to the last bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from ampd.compiled import ROOT, VARIABLE
from tools import compile as compiling

SCENE = "--model qwen3-32b --gpu h20 --prefill 2xTP2 --decode 2xTP2 --ttft 0.5 --itl 0.04"
TAU = f"tau-bench-airline {SCENE} --limit 60"
SIMULATIONS = {
    "default": f"{TAU} --rate 3",
    "overload": f"{TAU} --rate 12",
    "paper": f"{TAU} --rate 5 --routing ampd --ordering ampd --slicing whole",
    "coding-agents": f"coding-agents {SCENE} --rate 0.3 --limit 12",
    "modes": f"{TAU} --rate 4 --mode disaggregated,always-remote,colocated,continuum",
    "delayed views": f"{TAU} --rate 5 --state-delay-s 0.05 --coordinators 3 --kv-read-s 0.004",
    "chunked prefill": f"coding-agents {SCENE} --rate 0.3 --limit 10 --chunk-tokens 512 --no-hand-over-pass",
    "pools": f"{TAU} --rate 8 --pools predictive,arrow --binding predictive",
    "look-ahead": f"{TAU} --rate 9 --pools look-ahead",
    "store": f"{TAU} --rate 4 --kv-capacity-tokens 20000 --kv-store-gib-per-gpu 4 --moves --max-wait 3",
    "rivals": f"{TAU} --rate 9 --routing deflection,laps,table --ordering kairos,edf,hrrn",
}
"""Name -> arguments of `ampd simulate`."""

PROGRAM = """
import contextlib, hashlib, io, json, sys
from ampd import compiled
from ampd.cli.main import main

digests = {}
for name, words in json.loads(sys.argv[1]).items():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["simulate", *words.split(), "--jobs", "1", "--timeline", "timeline.json", "--json"]) == 0
    result = json.loads(out.getvalue())
    for each in [result, *result["results"]]:
        for wall_time in ("seconds", "wall_s"):
            each.pop(wall_time, None)
    text = json.dumps(result, sort_keys=True) + open("timeline.json").read()
    digests[name] = hashlib.sha256(text.encode()).hexdigest()
print(json.dumps({"state": compiled.state(), "digests": digests}))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages with a build beside it."""
    folder = tmp_path_factory.mktemp("copy")
    for package in (*compiling.PACKAGES, "tools"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    # Without optimization the compiler takes a fifth of the time, and floating point is the same.
    run(folder, "-m", "tools.compile", "--optimization", "0")
    return folder


def run(folder: Path, *words: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(folder)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout


def digests(folder: Path, **environment: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(folder, "-c", PROGRAM, json.dumps(SIMULATIONS), **environment))
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not shutil.which("cc") and not shutil.which("gcc"), reason="no C compiler")
@pytest.mark.skipif(not Path(sysconfig.get_path("include"), "Python.h").is_file(), reason="no headers of Python")
def test_a_compiled_simulation_equals_the_interpreted_one(copy: Path) -> None:
    compiled, interpreted = digests(copy), digests(copy, AMPD_COMPILED="0")
    assert compiled["state"] == "compiled"
    assert interpreted["state"] == "pure Python: AMPD_COMPILED is 0"
    assert compiled["digests"] == interpreted["digests"]
    # A change of one source, and nothing of the build is used.
    with (copy / "ampd" / "policies" / "capacity.py").open("a") as source:
        source.write("\n")
    assert "ampd.policies.capacity differs" in run(copy, "-m", "ampd", "--version")


def test_without_a_compiler_a_build_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools.compile"])
    monkeypatch.setenv("PATH", "")
    assert compiling.main() == 2
    assert capsys.readouterr().err.strip() == (
        "ampd: a build needs a C compiler: apt install gcc; without a build everything runs in pure Python"
    )
