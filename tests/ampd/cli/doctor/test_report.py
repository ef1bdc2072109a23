"""The report holds every finding, and no password."""

import json

import pytest

from ampd.cli.doctor.finding import Finding, Verdict
from ampd.cli.doctor.report import Report
from ampd.cli.doctor.shared_state import StateReading

REPORT = Report(
    [
        Finding("Python", Verdict.OK, "3.11"),
        Finding("Redis", Verdict.WRONG, "redis://ampd:hunter2@state:6379/0: away " + "word " * 60, "start it"),
    ],
    {"Redis": StateReading("redis://ampd:hunter2@state", problem="password=hunter2 is wrong"), "nothing": None},
)


def test_a_table_has_a_fix_below_its_finding() -> None:
    lines = REPORT.table(100).splitlines()
    assert lines[0] == "ok       Python  3.11"
    assert lines[1].startswith("wrong    Redis   redis://...@state:6379/0: away")
    assert lines[-1].strip() == "fix: start it"
    assert max(map(len, lines)) <= 100


def test_json_is_one_object() -> None:
    document = json.loads(REPORT.to_json())
    assert document["verdict"] == "wrong"
    assert document["findings"][0] == {"check": "Python", "verdict": "ok", "found": "3.11", "fix": ""}
    assert document["readings"]["Redis"]["place"] == "redis://...@state"


@pytest.mark.parametrize(
    "line",
    [
        "state url redis://ampd:hunter2@state\n'api_key': 'hunter2'",
        "redis://ampd:h@n/hunter2@state/0",
        "Authorization: Bearer hunter2",
    ],
)
def test_no_part_has_a_password(line: str) -> None:
    attachment = REPORT.attachment({"prefill-0": line})
    assert "hunter2" not in REPORT.table() + REPORT.to_json() + attachment
    assert "## The end of prefill-0.log" in attachment
