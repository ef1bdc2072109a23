"""The page on the Python API runs as it stands there, and a wheel's small installation is enough for it."""

import doctest
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ampd import PlanResult, RunResult, UserError, load_result, load_trace, plan, simulate
from ampd.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
CASE: dict[str, Any] = {"perf": "qwen3-32b-h20", "prefill": "1xTP4", "decode": "1xTP4"}


@pytest.mark.long
def test_the_page_prints_what_it_says() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.REPORT_NDIFF)
    assert result.attempted > 10
    assert result.failed == 0


def test_a_simulation_is_that_of_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = [f"--{name}={value}" for name, value in CASE.items()]
    assert main(["simulate", "tau-bench-airline", *flags, "--rate", "2", "--limit", "5", "--json"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "run.json").write_text(text)
    read = load_result(tmp_path / "run.json")
    made = simulate(load_trace("tau-bench-airline", 5), **CASE, rate=2, limit=5)
    assert isinstance(read, RunResult)
    assert made.model_dump(exclude={"document", "records"}) == read.model_dump(exclude={"document", "records"})
    assert made.attainment.rounds == json.loads(text)["attainment"]["rounds"]
    assert len(made.to_frame()) == len(made.records) == made.rounds


@pytest.mark.slow
def test_a_plan_is_read_from_its_file(tmp_path: Path) -> None:
    found = plan("tau-bench-airline", gpus=4, rate=0.5, perf="qwen3-32b-h20", degrees="4", budget_s=0)
    (tmp_path / "plan.json").write_text(json.dumps(found.document))
    read = load_result(tmp_path / "plan.json")
    assert isinstance(read, PlanResult)
    assert read == found
    assert found.to_frame().layout.tolist() == [str(layout) for layout in found.layouts]
    assert "--perf=qwen3-32b-h20" in found.document["command"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rat": 2}, "unknown argument 'rat'; did you mean 'rate'"),
        ({"report": "x"}, "unknown argument 'report'"),
        ({"rate": -1}, "--rate: give positive numbers"),
        ({"ttft": "x"}, r"simulate\(\): ttft: Input should be a valid number"),
        ({"mode": "disaggregated,colocated"}, "one call makes one simulation, these arguments name 2"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        simulate("tau-bench-airline", **CASE, limit=2, **arguments)


@pytest.mark.parametrize("text", ["[]", "{", '{"results": []}', '{"layouts": [{}]}', "3"])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json: (is not the JSON of one|not JSON)"):
        load_result(tmp_path / "x.json")


def test_without_pandas_a_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulate("tau-bench-airline", **CASE, limit=1)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        run.to_frame()


@pytest.mark.slow
def test_the_core_alone_imports_no_planner() -> None:
    script = "import ampd, sys; sys.exit(any(name.startswith('planner') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
