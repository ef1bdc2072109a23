"""What the pages tell people to type is accepted, and what they tell people to look at exists."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ampd.settings import parse_settings
from docs.reference import configuration
from docs.reference.configuration import Section
from tests.ampd.telemetry.metrics.registry_lab import by_name
from workers.engines import settings_model

_ROOT = Path(__file__).parents[2]
_PAGES = [_ROOT / "README.md", _ROOT / "k8s" / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_NO_PLAIN_COMMAND = re.compile(r"[`<>|;&]|\.\.\.|--help")
"""A pipe, a command that is cut short, or one that only asks."""


def _typed(text: str) -> Iterator[str]:
    """Command lines of ours that follow a prompt; comments behind them are left out."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if shown := re.match(r"\$ (?:\.venv/bin/)?((?:ampd|python -m) .*)$", line):
            yield re.split(r"\s+#|\s{2,}", shown[1])[0].strip()


def _section(command: str) -> Section | None:
    """The section whose settings a command takes: the one with the longest name that it begins with."""
    fitting = [section for section in configuration.SECTIONS if f"{command} ".startswith(f"{section.title} ")]
    return max(fitting, key=lambda section: len(section.title), default=None)


_COMMANDS = sorted(
    {
        (str(page.relative_to(_ROOT)), command)
        for page in _PAGES
        for command in _typed(page.read_text(encoding="utf-8"))
        if _section(command) is not None and not _NO_PLAIN_COMMAND.search(command)
    }
)


@pytest.mark.parametrize(("page", "command"), _COMMANDS)
def test_the_commands_of_the_pages_are_accepted(page: str, command: str) -> None:
    section = _section(command)
    assert section is not None
    model = configuration.load(section.model)
    if section.title.startswith("python -m workers"):
        model = settings_model("modelled" if "modelled" in command else "sglang")
    parse_settings(model, shlex.split(command.removeprefix(section.title)), page)


_MEASURED = [*_PAGES, _ROOT / "benchmarks" / "README.md", *sorted((_ROOT / "benchmarks").glob("*.py"))]
"""Pages and programs whose words say how a benchmark is run."""


@pytest.mark.parametrize("page", _MEASURED, ids=lambda page: str(page.name))
def test_a_benchmark_that_a_page_runs_as_a_file_imports_no_package_beside_it(page: Path) -> None:
    """Such a program finds neither `benchmarks` nor `tests`; `python -m` does."""
    typed = set(re.findall(r"(?:`|\s)(benchmarks/\w+\.py)(?:`| -| \[)", page.read_text(encoding="utf-8")))
    beside = re.compile(r"^(?:from|import) (?:benchmarks|tests)\b", re.MULTILINE)
    assert [name for name in typed if beside.search((_ROOT / name).read_text(encoding="utf-8"))] == []


def test_commands_are_found() -> None:
    assert {command.split()[1] for _, command in _COMMANDS} >= {"serve", "replay", "plan", "simulate", "profile", "top"}
    assert len(_COMMANDS) > 15


@pytest.mark.parametrize("page", _PAGES, ids=[str(page.relative_to(_ROOT)) for page in _PAGES])
def test_the_metrics_of_the_pages_exist(page: Path) -> None:
    named = set(re.findall(r"\bampd_[a-z_]*[a-z]\b(?!\*)", page.read_text(encoding="utf-8")))
    assert sorted(name for name in named if by_name(name) is None) == []
