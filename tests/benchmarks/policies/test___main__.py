"""`python -m benchmarks.policies`: its tables and page, and refusals in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ampd.errors import UserError
from benchmarks.policies.__main__ import run as command
from benchmarks.result_files import read

FLAGS = ["--settings", "real", "--only", "8b tau", "--duration", "5", "--contestants", "always-remote", "--jobs", "1"]


@pytest.mark.long
def test_the_command_writes_tables_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data = tmp_path / "page.html", tmp_path / "data.jsonl"
    kept = ["--seeds", "2", "--data", str(data), "--cache", str(tmp_path / "cache")]
    assert command([*FLAGS, *kept, "--write", str(tmp_path), "--page", str(page)]) == 0
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert {(row["contestant"], row["seed"]) for row in rows} == {
        (label, seed) for label in ("ours", "always-remote") for seed in (0, 1)
    }
    for row in rows:
        goodput, points = row["goodput"], {float(rate): point for rate, point in row["points"].items()}
        assert 0 < goodput["sustained_sessions"] <= goodput["sustained_rounds"]
        carried = goodput["sustained_rounds"]
        assert points[carried]["rounds"] >= 0.9
        assert points[carried]["in_time"] >= 0.99
        lost = [rate for rate, point in points.items() if point["rounds"] < 0.9 or point["in_time"] < 0.99]
        assert min(lost) <= 1.05 * carried
    (row,) = read(tmp_path / "contest-sustained-goodput-of-rounds-ours-against-others.csv")
    assert row["setting"] == "llama-3.1-8b tau-bench-airline 1xTP1+1xTP1"
    assert re.fullmatch(r"[\d.]+ ± [\d.]+", row["ours"])
    html = page.read_text()
    assert html.count('<div class="chart">') == 2
    assert not re.search(r"(?:src|href)=\"http", html)
    before = data.read_text()
    assert command([*FLAGS, *kept]) == 0
    assert data.read_text() == before
    assert "### sustained goodput of sessions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--contestants", "nobody"], "unknown contestant 'nobody'"),
        (["--settings", "moon"], "unknown group 'moon'"),
        (["--study", "nothing"], "unknown study 'nothing'"),
        (["--only", "nowhere", "--settings", "paper"], "no setting's name contains 'nowhere'"),
    ],
)
def test_wrong_flags_are_one_line(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        command([*flags, "--cache", str(tmp_path)])


def test_a_folder_that_does_not_exist_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is no folder; create it first"):
        command([*FLAGS, "--write", str(tmp_path / "nowhere")])
