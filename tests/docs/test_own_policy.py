"""The page on own policies is followed to the letter, from its file to its simulation."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "own-policy.md").read_text()
BLOCKS = dict(re.findall(r"```(python|toml|sh)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The page's package as an installer leaves it: its module and its metadata."""
    project = tomllib.loads(BLOCKS["toml"])["project"]
    (tmp_path / "my_policies.py").write_text(BLOCKS["python"])
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"{key} = {value}" for key, value in project["entry-points"]["ampd.policies"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[ampd.policies]", *lines, ""]))
    return tmp_path


def called(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder), str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    argv = [sys.executable, "-m", *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_the_pages_policy_decides_in_a_simulation(installed: Path) -> None:
    install, simulate = BLOCKS["sh"].strip().splitlines()
    assert install == "pip install -e ."
    result = called(installed, *shlex.split(simulate))
    assert (result.returncode, result.stderr) == (0, "")
    assert "busy-remote(most=2)" in result.stdout


def test_the_page_is_short() -> None:
    assert len([line for line in BLOCKS["python"].splitlines() if line]) <= 20


@pytest.mark.slow
def test_a_wrong_parameter_is_refused_as_the_page_says(installed: Path) -> None:
    _, simulate = BLOCKS["sh"].strip().splitlines()
    result = called(installed, *shlex.split(simulate.replace("most=2", "most=-1")))
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "routing policy busy-remote: most: Input should be greater than or equal to 0" in line


@pytest.mark.slow
def test_an_entry_point_that_cannot_be_imported_is_one_line(installed: Path) -> None:
    (installed / "my_policies.py").unlink()
    result = called(installed, *shlex.split(BLOCKS["sh"].strip().splitlines()[1]))
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "entry point 'mine' of my-policies: cannot import 'my_policies': No module named 'my_policies'" in line


@pytest.mark.slow
def test_an_entry_point_may_name_the_policy_itself(installed: Path) -> None:
    (points,) = installed.glob("*.dist-info/entry_points.txt")
    points.write_text("[ampd.policies]\nmine = my_policies:BusyRemote\n")
    result = called(installed, *shlex.split(BLOCKS["sh"].strip().splitlines()[1]))
    assert (result.returncode, result.stderr) == (0, "")
    assert "busy-remote(most=2)" in result.stdout


@pytest.mark.slow
def test_an_entry_point_of_a_policy_that_is_not_there_is_one_line(installed: Path) -> None:
    (points,) = installed.glob("*.dist-info/entry_points.txt")
    points.write_text("[ampd.policies]\nmine = my_policies:QuietRemote\n")
    result = called(installed, *shlex.split(BLOCKS["sh"].strip().splitlines()[1]))
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "cannot import 'my_policies:QuietRemote': AttributeError: module 'my_policies' has no attribute" in line
