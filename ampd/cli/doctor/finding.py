"""What a check finds, and the report of all findings: a table for people, or one JSON object."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from ampd.errors import UserError, one_line_of, without_credentials

SERVE = "ampd serve"
"""Whose checks are made here too: their messages begin with it, and what follows the last `; ` is the fix."""


class Verdict(StrEnum):
    """How a check ends, the worst one last."""

    SKIPPED = "skipped"
    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report.

    Attributes:
        found: what was read, or why the check was skipped.
        fix: one line; empty if nothing is to be done.
    """

    check: str
    verdict: Verdict
    found: str
    fix: str = ""


def made(name: str, check: Callable[[], Finding]) -> Finding:
    """The finding of a check. A check that fails itself is a finding, never an exception."""
    try:
        return check()
    except UserError as error:
        found, _, fix = str(error).removeprefix(f"{SERVE}: ").rpartition("; ")
        return Finding(name, Verdict.WRONG, found or fix, fix if found else "")
    except Exception as error:
        found = f"could not be made: {one_line_of(error)}"
        return Finding(name, Verdict.WRONG, found, "if the reason is not on this machine, report it with this table")


def worst(findings: Sequence[Finding]) -> Verdict:
    """The worst verdict; ok if every check was skipped."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)


def table(findings: Sequence[Finding], width: int) -> str:
    """One row per finding, with its fix below; `width`: of the lines, in characters."""
    name_width = max(len(finding.check) for finding in findings)
    margin = " " * (9 + name_width + 2)
    lines = []
    for finding in findings:
        lines += _wrapped(f"{finding.verdict:<7}  {finding.check:<{name_width}}  {finding.found}", width, margin)
        lines += _wrapped(f"{margin}fix: {finding.fix}", width, f"{margin}     ") if finding.fix else []
    return without_credentials("\n".join(lines))


def _wrapped(line: str, width: int, margin: str) -> list[str]:
    return textwrap.wrap(line, max(width, 60), subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)


def to_json(findings: Sequence[Finding]) -> str:
    """One object: `verdict` (the worst one) and `findings` (check, verdict, found, fix)."""
    document = {"verdict": worst(findings), "findings": [asdict(finding) for finding in findings]}
    return without_credentials(json.dumps(document, indent=1))
