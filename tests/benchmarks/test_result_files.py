"""Files of measured tables: how they are written and read, and what those of the project say of themselves."""

import re
from pathlib import Path

import pytest

from ampd.errors import UserError
from benchmarks import markdown_table
from benchmarks.result_files import as_csv, file_name, read, write

_ROOT = Path(__file__).parents[2]
_RESULTS = sorted((_ROOT / "benchmarks/results").rglob("*.csv"))
_PAGES = {
    page: (_ROOT / page).read_text("utf-8")
    for page in ("benchmarks/README.md", "docs/policies-benchmark.md", "docs/reliability.md")
}
_SUMMARY = _ROOT / "benchmarks/results/policies/best-layouts-summary.csv"


def test_a_table_is_written_with_its_commit_date_and_command(tmp_path: Path) -> None:
    table = markdown_table.table(["setting", "a, b"], [["`x`", "**1.0**"], ["y", "2.0"]])
    write(tmp_path, "study", {"Rates, engine pauses": table}, "python -m benchmarks.some --seeds 2")
    path = tmp_path / "study-rates-engine-pauses.csv"
    commit, command, *_ = path.read_text("utf-8").splitlines()
    assert re.fullmatch(r"# commit \S+, \d{4}-\d\d-\d\d", commit)
    assert command == "# python -m benchmarks.some --seeds 2"
    assert read(path) == [{"setting": "x", "a, b": "1.0"}, {"setting": "y", "a, b": "2.0"}]


def test_a_file_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no\.csv: cannot be read"):
        read(tmp_path / "no.csv")


def test_titles_become_names_of_files() -> None:
    assert file_name("study qwen3-32b toolbench l40s, rounds") == "study-qwen3-32b-toolbench-l40s-rounds.csv"
    assert as_csv("| a |\n| --- |\n| 1 |", ["x"]) == "# x\na\n1\n"


def test_there_are_results() -> None:
    assert len(_RESULTS) > 40


def test_results_say_how_they_came_about() -> None:
    """Which code, when, and by which command; or, for those of early commits, that no command was kept."""
    for path in _RESULTS:
        about = [line for line in path.read_text("utf-8").splitlines() if line.startswith("#")]
        assert re.match(r"# commits? \w{7}", about[0]), (path.stem, about)
        assert re.search(r"\d{4}-\d\d-\d\d", about[0]), (path.stem, about)
        assert re.search(r"python -m|benchmarks/\w+\.py|ampd |make |no command was kept", about[1]), (path.stem, about)
        rows = read(path)
        assert rows, path.stem
        assert all(None not in row and None not in row.values() for row in rows), f"{path.stem}: a row lacks columns"


def test_the_pages_and_the_results_lead_to_each_other() -> None:
    """By a result's own name, or by the beginning of the names of several, as in `study-*.csv`."""
    named = {
        name.removeprefix("../"): page
        for page, text in _PAGES.items()
        for name in set(re.findall(r"[\w./-]+\*?\.csv", text))
    }
    assert [path.stem for path in _RESULTS if not any(path.match(name) for name in named)] == []
    assert [f"{page}: {name}" for name, page in named.items() if not any(path.match(name) for path in _RESULTS)] == []


_SHOWN = {
    "fixed roles (`--pools static`)": "ours with fixed roles",
    "the default": "ours",
    "any policy at all, at most": "limit",
}
"""How the pages call the rows of the summary."""


@pytest.mark.parametrize(
    ("page", "before", "criterion", "rows"),
    [
        ("docs/policies-benchmark.md", "Rounds:", "rounds", 3),
        ("docs/policies-benchmark.md", "Sessions:", "sessions", 3),
        ("README.md", "## How it decides", "rounds", 2),
    ],
)
def test_the_pages_show_the_figures_of_the_search(page: str, before: str, criterion: str, rows: int) -> None:
    """No page claims more than was measured, or hides the lowest setting."""
    text = (_ROOT / page).read_text("utf-8").partition(f"\n{before}\n")[2]
    shown = re.findall(r"^\| (.+?) \| (\d.*) \|$", text, re.MULTILINE)[:rows]
    summary = {row["ours, from the even split"]: row for row in read(_SUMMARY)}
    assert len(shown) == rows
    for label, ratios in shown:
        row = summary[f"{_SHOWN[label]}, {criterion}"]
        over = ("best rival", "best of our parts")
        measured = [f"{row[f'/ {other}, mean']} ({row[f'/ {other}, lowest']})" for other in over]
        assert ratios.split(" | ") == measured[: ratios.count("|") + 1], label
