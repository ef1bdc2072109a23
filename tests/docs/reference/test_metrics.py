"""docs/metrics.md lists every metric and is up to date."""

from pathlib import Path

import pytest

from ampd.telemetry.metrics.names import METRICS
from docs.reference.metrics import render

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "python -m docs.reference.metrics > docs/metrics.md"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_each_metric_has_its_row(metric: object) -> None:
    assert render().count(f"| `{metric.name}` | {metric.kind} |") == 1  # type: ignore[attr-defined]
