"""The choice of sessions for shipped traces: those that fit, evenly spread, with every round as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.select_sessions import run
from workloads.trace import Round, Session, load_trace, write_trace


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "chosen"), [(3, [0, 3, 6]), (9, [*range(9)]), (50, [*range(9)])])
def test_sessions_that_fit_are_chosen_evenly_and_unchanged(tmp_path: Path, wanted: int, chosen: list[int]) -> None:
    def session(name: str, *tool_s: float, incr_tokens: int = 10) -> Session:
        rounds = tuple(Round(incr_tokens=incr_tokens, output_tokens=5, tool_s=gap_s) for gap_s in tool_s)
        return Session(session_id=name, arrival_s=0.0, rounds=rounds)

    good = [session(f"good{number}", 0.0, 1.0, float(number)) for number in range(9)]
    bad = [session("short", 0.0, 1.0), session("idle", 0.0, 11.0, 1.0), session("long", 0.0, 1.0, 1.0, incr_tokens=99)]
    source, target = tmp_path / "source.jsonl", tmp_path / "target.jsonl"
    write_trace([*bad, *good], source)
    flags = ["--max-context", "100", "--max-gap", "10", "--rate", "2", "--sessions", str(wanted)]
    assert run([str(source), str(target), *flags]) == 0
    found = load_trace(str(target))
    assert [each.rounds for each in found] == [good[number].rounds for number in chosen]
    arrivals = [each.arrival_s for each in found]
    assert arrivals == sorted(arrivals)
