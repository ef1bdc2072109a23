"""A live graph's metrics under load say what the client of the replay saw."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from ampd.types import Slo
from benchmarks.metrics_agreement import compared, later_than_measured, replayed
from workloads.trace import load_trace, retime

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

SLO = Slo(1.0, 5.0)
"""An ITL that no round misses: who attains is then a matter of the TTFT alone, where the clocks have an order."""


def test_the_metrics_of_a_loaded_graph_agree_with_the_client(tmp_path: Path) -> None:
    # No admission: a refused round would count at the client, and not as a round at the coordinators.
    serve = [
        "--engine",
        "modelled",
        "--prefill",
        "1",
        "--decode",
        "2",
        "--coordinators",
        "2",
        "--pools",
        "static",
        "--max-wait",
        "0",
    ]
    sessions = retime(load_trace("tau-bench-airline"), 4.0, 0, 24)
    client, scraped = replayed(tmp_path, serve, sessions, SLO)
    rows = compared(client, scraped)
    assert client.result["errors"] == 0
    assert client.result["rounds"] == sum(len(session.rounds) for session in sessions)
    assert min(client.result["routes"].values()) > 0
    assert min(client.result["kv_bytes"].values()) > 0
    counts = [row for row in rows if row.is_count]
    assert {row.what: row.metrics for row in counts} == {row.what: row.client for row in counts}
    # A clock at the client says a little more than one at the coordinator, never less.
    assert later_than_measured(client, scraped) == []
    assert not [row for row in rows if "TTFT" in row.what and row.metrics > row.client]
    assert not [row for row in rows if "attainment" in row.what and row.metrics < row.client]
    # How much more depends on how busy the machine is. What coordinators told the client is what they counted.
    means = {row.what: row.metrics for row in rows}
    for kind, is_initial in (("initial", True), ("incremental", False)):
        told_s = [record.decision["ttft_s"] for record in client.records if (record.index == 0) == is_initial]
        assert means[f"mean TTFT, {kind} (s)"] == pytest.approx(fmean(told_s))
    (itl,) = (row for row in rows if "ITL" in row.what)
    assert itl.metrics / 10 < itl.client < itl.metrics * 10, "the same unit"
