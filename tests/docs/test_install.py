"""How AMPD is installed: from its repository. On PyPI the name `ampd` is another project."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).parents[2]
_FOREIGN = re.compile(r"install\b[^\n]*?(?<![\w./-])ampd(\[|['\"`\s]*$)", re.MULTILINE)
_KINDS = {".md", ".py", ".sh", ".toml", ".yaml", ".j2", ""}
_SKIPPED = {"node_modules", "out", "build", "logs"}


def _texts() -> dict[str, str]:
    found: dict[str, str] = {}
    for folder, folders, files in os.walk(_ROOT):
        folders[:] = [name for name in folders if name not in _SKIPPED and (name == ".ci" or not name.startswith("."))]
        for path in (Path(folder, name) for name in files if Path(name).suffix in _KINDS):
            if path != Path(__file__):
                found[str(path.relative_to(_ROOT))] = path.read_text("utf-8", errors="replace")
    return found


def test_no_text_installs_the_other_project() -> None:
    texts = _texts()
    assert {"README.md", "Makefile", "docs/clients.md", "ampd/cli/serve/settings.py"} <= texts.keys()
    assert [f"{path}: {found[0]}" for path, text in texts.items() for found in _FOREIGN.finditer(text)] == []


def test_the_search_finds_such_a_line() -> None:
    for line in ("pip install 'ampd[sglang]'", "uv pip install --upgrade ampd", 'fix = "pip install ampd[x], or"'):
        assert _FOREIGN.search(line), line
    for line in ("uv pip install --editable '.[sglang]'", "install it, then run ampd serve"):
        assert not _FOREIGN.search(line), line


_MOST_BYTES = 300e6


def _needed(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """A package and everything that it needs without extras, as installed here."""
    key = canonicalize_name(name)
    if key in found:
        return found
    found[key] = distribution(name)
    for text in found[key].requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            _needed(requirement.name, found)
    return found


def _base() -> dict[str, Distribution]:
    """What `pip install .` brings beside AMPD: its own metadata may be older than pyproject.toml."""
    found: dict[str, Distribution] = {}
    for text in tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            _needed(requirement.name, found)
    return found


def test_planning_needs_less_than_300_mb() -> None:
    sizes = {
        name: sum(Path(str(path.locate())).stat().st_size for path in each.files or [] if path.suffix != ".pyc")
        for name, each in _base().items()
    }
    assert {"ai-dynamo", "sglang", "torch", "matplotlib", "scipy"} & sizes.keys() == set()
    assert 50e6 < sum(sizes.values()) < _MOST_BYTES


def test_pip_finds_every_requirement_of_dynamo() -> None:
    """One of them cannot be built from PyPI alone. The stand-in has the name and version that Dynamo wants."""
    stand_in = tomllib.loads((_ROOT / "tools" / "aisimulate" / "pyproject.toml").read_text())["project"]
    needed = [Requirement(text) for text in distribution("ai-dynamo").requires or []]
    (required,) = (each for each in needed if each.name == stand_in["name"])
    assert stand_in["version"] in required.specifier
    guide = (_ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\$ pip install \./tools/aisimulate '\.\[(?:serve|sglang)\]'", guide, re.MULTILINE)) == 2


_ALONE = """
import sys
from importlib.abc import MetaPathFinder
class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
refused = set(sys.argv.pop(1).split(","))
sys.meta_path.insert(0, Refuse())
from ampd.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "simulate tau-bench-airline --perf qwen3-32b-h20 --prefill 1xTP4 --decode 1xTP4 --limit 5",
        "plan tau-bench-airline --perf qwen3-32b-h20 --gpus 8 --rate 0.5 --degrees 4 --limit 5 --budget-s 2",
    ],
)
def test_simulations_and_plans_import_nothing_else(command: str, tmp_path: Path) -> None:
    """Every other installed package is made to look missing."""
    needed = {name for each in _base().values() for name in _top_levels(each)}
    others = {name for each in distributions() for name in _top_levels(each)} - needed
    others -= {"ampd", "ampd_rivals", "planner", "router", "workers", "workloads", "k8s", "_virtualenv"}
    argv = [sys.executable, "-c", _ALONE, ",".join(sorted(others)), *command.split()]
    done = subprocess.run([*argv, "--report", str(tmp_path / "x.html")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch" in others


def _top_levels(package: Distribution) -> set[str]:
    names = {path.parts[0].partition(".")[0] for path in package.files or [] if path.suffix in (".py", ".so")}
    return {name for name in names if name.isidentifier()}
