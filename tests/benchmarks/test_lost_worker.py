"""What a lost worker costs, by the time at which rounds were sent."""

from typing import Any

import pytest

from ampd.types import Slo
from benchmarks.lost_worker import SOON_S, main, shares, table

SLO = Slo(1.0, 0.1)


def record(sent_s: float, ttft_s: float | None = 0.5, itl_s: float | None = 0.05, error: str | None = None) -> Any:
    return {"sent_s": sent_s, "ttft_s": ttft_s, "itl_s": itl_s, "error": error}


def test_rounds_count_by_when_they_were_sent_and_failed_ones_are_missed() -> None:
    lost_s = 40.0
    records = [record(1.0), record(39.9, ttft_s=1.1), record(40.0, error="gone"), record(lost_s + SOON_S, itl_s=None)]
    assert shares(records, lost_s, SLO) == {"before": 0.5, "soon": 0.0, "later": 1.0}
    assert shares(records[:2], lost_s, SLO)["later"] is None


def test_the_table_has_medians_and_each_run() -> None:
    run = {"before": 1.0, "soon": 0.5, "later": 0.75, "failed": 2, "changes_before": 0.0, "changes_after": 1.0}
    text = table({"static": [run, run | {"later": 0.25}], "predictive": [run | {"later": None}]})
    assert "| `static` | 100.0 % | 50.0 % | 50.0 % | 75.0 %, 25.0 % | 2, 2 | 0, 0 | 1, 1 |" in text
    assert text.splitlines()[-1].startswith("| `predictive` | 100.0 % | 50.0 % | - |  | 2 |")
    assert table({"static": [run | {"changes_after": None}, run]}).splitlines()[-1].endswith("| graph ended, 1 |")
    with pytest.raises(KeyError):
        table({"static": [{}]})


def test_an_unknown_way_to_choose_roles_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--pools", "static,magic"])
    assert refused.value.code == 2
    assert "--pools: magic is not one of static, predictive" in capsys.readouterr().err
