"""docs/metrics.md lists every metric and is up to date."""

from pathlib import Path

from ampd.telemetry.metrics.names import METRICS
from docs.reference.metrics import render

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "python -m docs.reference.metrics > docs/metrics.md"


def test_each_metric_has_its_row() -> None:
    rows = render().splitlines()
    for metric in METRICS:
        row = f"| `{metric.name}` | {metric.kind} |"
        assert len([line for line in rows if line.startswith(row)]) == 1, row
