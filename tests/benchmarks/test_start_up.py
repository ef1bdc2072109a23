"""The phases of a start are read from the logs of the workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ampd.errors import RunError
from benchmarks import start_up
from benchmarks.start_up import Watch, main, start_demo, table

LINES = ["INFO Available plugins for group x", "INFO Engine startup timings (s): 1", "INFO decode worker 9a1c is ready"]


def test_a_phase_ends_with_the_last_worker(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    (tmp_path / "frontend.log").write_text("")
    watch.look()
    assert watch.reached == {}
    for name in ("prefill-0", "decode-1"):
        (tmp_path / f"{name}.log").write_text("\n".join(LINES))
    (tmp_path / "decode-1.log").write_text(LINES[0])
    watch.look()
    assert list(watch.reached) == ["first worker was started", "SGLang's own start began"]
    before = dict(watch.reached)
    (tmp_path / "decode-1.log").write_text("\n".join(LINES))
    watch.look()
    assert list(watch.reached)[2:] == ["SGLang's processes are up", "worker is ready"]
    assert before.items() <= watch.reached.items(), "an end is noted once"


def test_the_table_has_medians_and_extremes() -> None:
    rows = table({"here": [{"ready": 3.0}, {"ready": 1.0}, {"ready": 9.0}], "there": [{}, {}, {"ready": 5.0}]})
    assert rows.splitlines()[-1] == "| ready | 3.0 (1.0 to 9.0) | 5.0 (5.0 to 5.0) |"


DEMO = """
import signal, sys
print("make: sets up the environment", flush=True)
print("$ ampd serve --engine", sys.argv[1], flush=True)
if sys.argv[1] == "ENGINE=ready":
    print("ready: http://127.0.0.1:1/v1", flush=True)
    signal.pause()
sys.exit(3)
"""


@pytest.mark.slow
def test_a_demo_is_stopped_when_its_graph_is_ready() -> None:
    figures = start_demo("ready", (sys.executable, "-c", DEMO))
    assert 0 < figures["installed"] <= figures["ready"]


@pytest.mark.slow
def test_a_demo_that_ends_before_its_graph_is_ready_is_an_error() -> None:
    with pytest.raises(RunError, match="exit code 3"):
        start_demo("broken", (sys.executable, "-c", DEMO))


@pytest.mark.parametrize("flags", [["--against", "."], ["--cold"]])
def test_a_demo_takes_no_flag_that_it_would_ignore(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--demo", *flags])
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_a_failed_start_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: str) -> dict[str, float]:
        raise RunError("the demo was never ready (exit code 3)")

    monkeypatch.setattr(start_up, "start_demo", fail)
    assert main(["--demo"]) == 2
    assert capsys.readouterr().err == "start_up: the demo was never ready (exit code 3)\n"
