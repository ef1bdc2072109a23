"""Transports of machines that are not this one, and of this one."""

from dataclasses import replace
from pathlib import Path

import pytest

from ampd.cli.doctor.finding import Verdict
from ampd.cli.doctor.transport import (
    RateReading,
    TransportReading,
    active_cards,
    judge_transport,
    protocols,
    read_transport,
)

LOG = """\
[1.26] [vm:2:1]  ucp_worker.c:1997 UCX  INFO    agent intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)
[1.27] [vm:1:0]   | agent self cfg#0                                                 |
[1.27] [vm:1:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.27] [vm:1:0]   | 0..inf | copy-out    | self/memory                               |
[1.28] [vm:2:1]   | agent intra-node cfg#1                                           |
[1.28] [vm:2:1]   | active message by ucp_am_send*(multi) from host memory           |
[1.28] [vm:2:1]   | 627..inf | multi-frag copy-in | tcp/lo                           |
[1.29] [vm:2:1]   +--------+-------------+-------------------------------------------+
[1.29] [vm:2:1]   | agent intra-node cfg#1                                           |
[1.29] [vm:2:1]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.29] [vm:2:1]   +--------+-------------+-------------------------------------------+
[1.29] [vm:2:1]   | Range  | Description |                  Config                   |
[1.29] [vm:2:1]   | 0..256 | short       | tcp/lo                                    |
[1.29] [vm:2:1]   | 257..inf | zero-copy | cma/memory                                |
"""
HERE = RateReading(9.0, 10.0, 0.0001, ("cma/memory (zero-copy)",))
TCP = RateReading(2.0, 10.0, 0.0005, ("tcp/lo (zero-copy)",))
PLAIN = TransportReading(HERE, TCP, {}, 3.125, {})
RDMA = replace(PLAIN, cards={"mlx5_0": 50.0}, over_network=RateReading(45.0, 10.0, 0.00003, ("rc_mlx5/mlx5_0:1",)))


def test_the_protocol_for_large_reads_from_another_process_is_found() -> None:
    assert protocols(LOG) == ("cma/memory (zero-copy)",)


def test_active_cards_are_read(tmp_path: Path) -> None:
    for device, port, state in (("mlx5_0", 1, "4: ACTIVE"), ("mlx5_1", 1, "1: DOWN"), ("mlx5_0", 2, "4: ACTIVE")):
        folder = tmp_path / device / "ports" / str(port)
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (folder / "rate").write_text("200 Gb/sec (4X HDR)\n")
    assert active_cards(tmp_path) == {"mlx5_0": 50.0}


@pytest.mark.parametrize(
    ("reading", "verdicts"),
    [
        (PLAIN, [Verdict.OK, Verdict.OK]),
        (replace(PLAIN, fastest_card_gb_per_s=None), [Verdict.OK, Verdict.OK]),
        (replace(PLAIN, fastest_card_gb_per_s=12.5), [Verdict.OK, Verdict.SLOW]),
        (replace(PLAIN, here=TCP), [Verdict.SLOW, Verdict.OK]),
        (replace(PLAIN, here=RateReading(problem="exit code -11")), [Verdict.WRONG, Verdict.OK]),
        (RDMA, [Verdict.OK, Verdict.OK]),
        (replace(RDMA, over_network=TCP), [Verdict.OK, Verdict.SLOW]),
        (replace(RDMA, over_network=RateReading(problem="no such device")), [Verdict.OK, Verdict.WRONG]),
    ],
)
def test_rates_relative_to_the_hardware(reading: TransportReading, verdicts: list[Verdict]) -> None:
    findings = judge_transport(reading)
    assert [finding.verdict for finding in findings] == verdicts
    assert all(bool(finding.fix) is (finding.verdict is not Verdict.OK) for finding in findings)


@pytest.mark.slow
def test_this_machine_is_measured() -> None:
    pytest.importorskip("nixl")
    reading = read_transport()
    assert reading.here.problem == ""
    assert reading.here.gb_per_s > 0
    assert reading.here.copy_gb_per_s > 0
    assert reading.here.transports
    assert reading.cards or (reading.over_network.problem == "" and "tcp" in reading.over_network.transports[0])
