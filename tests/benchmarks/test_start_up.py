"""The phases of a start are read from the logs of the workers."""

from __future__ import annotations

from pathlib import Path

from benchmarks.start_up import Watch, table

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
