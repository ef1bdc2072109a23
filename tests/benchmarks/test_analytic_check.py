"""The kept rows of the analytic model against AIConfigurator are those of today."""

import pytest

from ampd.perf.presets import analytic_model
from ampd.types import Parallelism
from benchmarks.analytic_check import RESULTS, table
from benchmarks.result_files import read


def test_the_kept_rows_are_of_the_model_as_it_is() -> None:
    models = {row["model"] for row in read(RESULTS)}
    assert len(models) >= 6
    assert {row["gpu"] for row in read(RESULTS)} == {"h100", "h200", "b200", "l40s"}
    for row in read(RESULTS)[::7]:
        model, theta = analytic_model(row["model"], row["gpu"]), Parallelism(int(row["tp"]))
        what, first, _, second = row["what"].split()
        if what == "prefill":
            seconds = model.prefill_s(int(second), int(first), theta)
        else:
            seconds = model.decode_step_s(int(first), int(first) * int(second), theta)
        assert 1e3 * seconds == pytest.approx(float(row["ours_ms"]), abs=0.01), row


def test_the_worst_rows_come_first() -> None:
    near = {"model": "a", "gpu": "h200", "tp": "1", "what": "step 1 x 1", "ratio": "1.20"}
    far = near | {"model": "b", "ratio": "0.50"}
    lines = table([near, far, far | {"ratio": "1.10"}, far | {"gpu": "h100", "ratio": "1.0"}]).splitlines()
    assert lines[2:] == ["| b | h200 | 1 | - | 0.50 to 1.10 | 1.30 |", "| a | h200 | 1 | - | 1.20 to 1.20 | 1.20 |"]
