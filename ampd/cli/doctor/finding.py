"""What a check finds, and how a check is made: a reading of the machine, then a judgement of the reading alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from ampd.errors import one_line_of

Reading = TypeVar("Reading")


class Verdict(StrEnum):
    """How a check ends, the worst one last."""

    SKIPPED = "skipped"
    OK = "ok"
    SLOW = "slow"
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


@dataclass(frozen=True, slots=True)
class Check(Generic[Reading]):
    """One check. `read` looks at the machine and may fail. `judge` is a pure function of what was read."""

    name: str
    read: Callable[[], Reading]
    judge: Callable[[Reading], Sequence[Finding]]


def made(check: Check[Any]) -> tuple[Any, list[Finding]]:
    """The reading and the findings of a check. A check that fails itself is a finding, never an exception."""
    reading = None
    try:
        reading = check.read()
        return reading, list(check.judge(reading))
    except Exception as error:
        fix = "if the reason is not on this machine, report it with the file that --out writes"
        return reading, [Finding(check.name, Verdict.WRONG, f"could not be made: {one_line_of(error)}", fix)]


def worst(findings: Sequence[Finding]) -> Verdict:
    """The worst verdict; ok if every check was skipped."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)
