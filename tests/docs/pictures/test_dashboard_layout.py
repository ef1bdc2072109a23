"""The picture of the dashboard: what is drawn is what was answered, at the panels' places."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).parents[3]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "k8s" / "monitoring" / "dashboard.json").read_text())
PICTURE = ROOT / "docs" / "pictures" / "dashboard.png"


@pytest.fixture(scope="module")
def layout() -> ModuleType:
    path = ROOT / "docs" / "pictures" / "dashboard_layout.py"
    spec = importlib.util.spec_from_file_location("dashboard_layout", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dashboard_layout"] = module
    spec.loader.exec_module(module)
    return module


def answered(layout: ModuleType, value: float) -> list[Any]:
    """Every panel, each expression answered by two series of ten seconds."""

    def answer() -> list[Any]:
        return [layout.Series({"pod": name}, [(float(at), value + at) for at in range(10)]) for name in "ab"]

    return [layout.Panel.of(panel, [answer() for _ in panel.get("targets", [])]) for panel in DASHBOARD["panels"]]


@pytest.mark.long
def test_every_panel_can_be_drawn(layout: ModuleType, tmp_path: Path) -> None:
    for name, value in (("values", 1.0), ("none", math.nan)):
        layout.draw(answered(layout, value), "title", tmp_path / f"{name}.png")
    assert (tmp_path / "values.png").read_bytes() != (tmp_path / "none.png").read_bytes()


def test_the_picture_is_as_large_as_the_dashboard(layout: ModuleType) -> None:
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in DASHBOARD["panels"])
    with Image.open(PICTURE) as picture:
        drawn = picture.height / layout.DPI / layout.UNIT_IN
    assert abs(drawn - height) < 2, "panels have come or gone: draw it again"
    assert PICTURE.stat().st_size < 300_000


def test_legends_name_their_series(layout: ModuleType) -> None:
    series = layout.Series({"route": "local", "reason": "on-time"}, [])
    assert series.named("{{route}}: {{ reason }}") == "local: on-time"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.045, "s", "45 ms"),
        (1.5, "s", "1.5 s"),
        (0.968, "percentunit", "96.8 %"),
        (12_000_000, "Bps", "12 MB/s"),
        (9.64, "reqps", "9.64/s"),
        (18_000, "short", "18 k"),
    ],
)
def test_values_have_their_units(layout: ModuleType, value: float, unit: str, text: str) -> None:
    assert layout.formatted(value, unit) == text
