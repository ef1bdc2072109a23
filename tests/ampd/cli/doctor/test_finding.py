"""The worst verdict counts, and the report has no password."""

import json
from collections.abc import Sequence

import pytest

from ampd.cli.doctor import Finding, Verdict, table, to_json, worst

FINDINGS = [
    Finding("model", Verdict.OK, "tiny"),
    Finding("Redis", Verdict.WRONG, "redis://ampd:h@n/hunter2@state:6379/0: away " + "word " * 60, "start it"),
]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ((), Verdict.OK),
        ((Verdict.SKIPPED,), Verdict.SKIPPED),
        ((Verdict.OK, Verdict.SKIPPED), Verdict.OK),
        ((Verdict.WARNING, Verdict.OK), Verdict.WARNING),
        ((Verdict.WARNING, Verdict.WRONG, Verdict.OK), Verdict.WRONG),
    ],
)
def test_the_worst_verdict_counts(verdicts: Sequence[Verdict], expected: Verdict) -> None:
    assert worst([Finding("a", verdict, "") for verdict in verdicts]) is expected


def test_a_table_has_a_fix_below_its_finding() -> None:
    lines = table(FINDINGS, 100).splitlines()
    assert lines[0] == "ok       model  tiny"
    assert lines[1].startswith("wrong    Redis  redis://...@state:6379/0: away")
    assert lines[-1].strip() == "fix: start it"
    assert max(map(len, lines)) <= 100


def test_json_is_one_object() -> None:
    text = to_json(FINDINGS)
    document = json.loads(text)
    assert document["verdict"] == "wrong"
    assert document["findings"][0] == {"check": "model", "verdict": "ok", "found": "tiny", "fix": ""}
    assert "redis://...@state:6379/0" in text
    assert "hunter2" not in text
