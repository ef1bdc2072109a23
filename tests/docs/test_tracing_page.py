"""The page about following a round says what there is: fields of the decision record, lines, ids."""

import json
import re
from pathlib import Path

from ampd.telemetry.tracing import Trace
from ampd.types import Slo
from router.decision_record import DecisionRecord

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "tracing.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return _PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> set[str]:
    """What stands as code in the first column of a section's table."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_field_of_the_decision_record_is_described_and_no_other() -> None:
    assert first_cells(section("The decision record")) == DecisionRecord("s", "p", Slo(1.0, 0.1)).as_dict().keys()


def test_every_message_of_a_round_is_described() -> None:
    sources = [_ROOT / room / "round_log.py" for room in ("router", "workers")]
    said = {
        message
        for source in sources
        for message in re.findall(r'"((?:round|prefill|decode|KV) [a-z ]+)"', source.read_text(encoding="utf-8"))
    }
    assert len(said) > 8
    assert said <= first_cells(section("The lines"))


def test_the_example_is_one_round_with_all_its_ids() -> None:
    lines = [json.loads(line) for line in section("Reading").splitlines() if line.startswith('    {"time"')]
    assert [line["message"] for line in lines][:1] == ["round placed"]
    ids = [{name: line.get(name) for name in Trace("r", "t", "x", "s").fields()} for line in lines]
    assert len(lines) > 8
    assert all(ids[0].values())
    assert all(line_ids == ids[0] for line_ids in ids)
    assert ids[0]["trace_id"] in section("Reading").split("\n    {")[0]
