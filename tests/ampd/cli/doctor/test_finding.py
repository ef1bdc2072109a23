"""A check that fails itself is a finding, and the worst verdict counts."""

from collections.abc import Sequence

import pytest

from ampd.cli.doctor.finding import Check, Finding, Verdict, made, worst


def _refuse(*_: object) -> list[Finding]:
    raise OSError(13, "Permission denied")


@pytest.mark.parametrize("check", [Check("a", _refuse, lambda _: []), Check("a", lambda: 1, _refuse)])
def test_a_check_that_cannot_be_made_is_wrong(check: Check[object]) -> None:
    _, (finding,) = made(check)
    assert (finding.check, finding.verdict) == ("a", Verdict.WRONG)
    assert finding.found == "could not be made: [Errno 13] Permission denied"
    assert finding.fix


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ((), Verdict.OK),
        ((Verdict.SKIPPED,), Verdict.SKIPPED),
        ((Verdict.OK, Verdict.SKIPPED), Verdict.OK),
        ((Verdict.SLOW, Verdict.OK), Verdict.SLOW),
        ((Verdict.SLOW, Verdict.WRONG, Verdict.OK), Verdict.WRONG),
    ],
)
def test_the_worst_verdict_counts(verdicts: Sequence[Verdict], expected: Verdict) -> None:
    assert worst([Finding("a", verdict, "") for verdict in verdicts]) is expected
