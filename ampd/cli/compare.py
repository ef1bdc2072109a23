"""`ampd compare`: results of replays, simulations and plans beside each other, from what they wrote with `--json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from pydantic_settings import CliPositionalArg

from ampd.documents import check_writable
from ampd.errors import UserError
from ampd.reports.page import write_page
from ampd.settings import Settings, parse_settings
from planner.layout.layout import layout_label
from planner.reports import write_plan_report, write_simulation_report
from workloads.report import figures_table, sections, write_replay_report
from workloads.trace import parse_json

PROG = "ampd compare"
_REPORTS = {"replay": write_replay_report, "simulation": write_simulation_report, "plan": write_plan_report}
"""Kind of a document -> what writes the report of one."""


class CompareSettings(Settings):
    """Compare results of `ampd replay --json`, `ampd simulate --json` and `ampd plan --json`; the first is the base."""

    topics: ClassVar = {"report": "output"}

    files: CliPositionalArg[list[str]] = Field(
        description="Files of results. A single one makes its own report again.", min_length=1
    )
    report: Path | None = Field(None, description="Write an HTML report to this file.")


def run(argv: Sequence[str]) -> int:
    """Print the figures, and write the report.

    Raises:
        UserError: a file has no such result.
        RunError: the report cannot be written.
    """
    settings = parse_settings(CompareSettings, argv, PROG)
    check_writable(settings.report)
    documents = {path: _document(path) for path in map(Path, settings.files)}
    try:
        _compare(documents, settings.report)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{PROG}: a file is not of this version of AMPD: {error!r}") from None
    return 0


def _compare(documents: dict[Path, dict[str, Any]], report: Path | None) -> None:
    note = _kinds(documents)
    if runs := _runs(documents):
        print(figures_table(runs) + note)
    if report is None:
        return
    if len(documents) == 1:
        (document,) = documents.values()
        _REPORTS[document["kind"]](report, document)
    else:
        write_page(report, "Comparison", ", ".join(map(str, documents)) + "." + note, sections(runs))


def _kinds(documents: dict[Path, dict[str, Any]]) -> str:
    """A note behind figures that were not all found in the same way."""
    kinds = {path: document["kind"] for path, document in documents.items()}
    if len(set(kinds.values())) == 1:
        return ""
    told = ", ".join(f"{path} is a {kind}" for path, kind in kinds.items())
    return f"\n\n{told}. The figures of a plan are of its simulation at the rate that was asked."


def _document(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{PROG}: {path}: cannot be read ({error})") from None
    document = parse_json(text, str(path))
    if not isinstance(document, dict) or document.get("kind") not in _REPORTS:
        raise UserError(f"{PROG}: {path}: is no result of this version (--json of ampd replay, simulate or plan)")
    return document


def _runs(documents: dict[Path, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Everything that the documents have figures of, by a name that no other has."""
    stems = Counter(path.stem for path in documents)
    runs: dict[str, dict[str, Any]] = {}
    for path, document in documents.items():
        found = _runs_of(document)
        file = path.stem if stems[path.stem] == 1 else str(path)
        for name, run in found:
            whole = file if len(found) == 1 else f"{file}: {name}"
            runs[name if len(documents) == 1 else whole] = run
    return runs


def _runs_of(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if document["kind"] == "plan":
        layouts = document["layouts"][:1]
        return [(layout_label(layout), layout["simulated"] | {"gpus": layout["gpus"]}) for layout in layouts]
    if document["kind"] == "replay":
        return [("replay", document)]
    rates = {result["rate"] for result in document["results"]}
    return [
        (result["label"] + (f" at {result['rate']:g}/s" if len(rates) > 1 else ""), result)
        for result in document["results"]
    ]
