"""Check of the KV transport: which UCX transport NIXL uses here, and its rate relative to the hardware."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ampd.child_process import tied_to_parent
from ampd.cli.doctor.finding import Finding, Verdict

_TIMEOUT_S = 120.0
_CARDS = Path("/sys/class/infiniband")
_NETWORK = Path("/sys/class/net")
_ACTIVE = "ACTIVE"
_GOOD_SHARE_OF_COPY = 0.3
_GOOD_SHARE_OF_CARD = 0.5


@dataclass(frozen=True, slots=True)
class RateReading:
    """One measurement with NIXL.

    Attributes:
        gb_per_s: 64 MB in blocks of 1 MB. copy_gb_per_s: a plain copy of as many bytes by one core.
        block_s: seconds of a read of one block.
        transports: UCX's protocols for reads of large blocks, as in `cma/memory (zero-copy)`.
        problem: why nothing could be measured; empty: it was.
    """

    gb_per_s: float = 0.0
    copy_gb_per_s: float = 0.0
    block_s: float = 0.0
    transports: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class TransportReading:
    """NIXL between two processes of this machine, and over the network.

    Attributes:
        cards: RDMA device -> GB/s of its active ports.
        fastest_card_gb_per_s: of the network cards that are no RDMA device; None: the driver does not tell.
        over_network: by RDMA where a card is active, else by TCP on loopback.
        variables: UCX's and NIXL's variables that are set.
    """

    here: RateReading
    over_network: RateReading
    cards: Mapping[str, float]
    fastest_card_gb_per_s: float | None
    variables: Mapping[str, str]


def read_transport() -> TransportReading:
    """Measure twice, each time in processes of their own."""
    cards = active_cards(_CARDS)
    forced = {"UCX_TLS": "ib"} if cards else {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    set_here = {name: value for name, value in os.environ.items() if name.startswith(("UCX_", "NIXL_"))}
    return TransportReading(_rate({}), _rate(forced), cards, _fastest_card(_NETWORK), set_here)


def _rate(variables: Mapping[str, str]) -> RateReading:
    with tempfile.TemporaryDirectory(prefix="ampd-doctor-") as folder:
        log = Path(folder) / "ucx.log"
        # UCX writes to stdout by default.
        quiet = {"UCX_LOG_FILE": str(log), "UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", "NIXL_LOG_LEVEL": "WARN"}
        argv = tied_to_parent([sys.executable, "-m", "ampd.cli.doctor.nixl_rate"])
        try:
            done = subprocess.run(
                argv,
                env={**os.environ, **quiet, **variables},
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return RateReading(problem=f"no result after {_TIMEOUT_S:.0f} s")
        if done.returncode != 0:
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no output"]
            return RateReading(problem=f"exit code {done.returncode}: {last[0].strip()[:300]}")
        return measured(done.stdout, log.read_text(errors="replace") if log.exists() else "")


def measured(printed: str, log: str) -> RateReading:
    """What the measuring process printed last, with UCX's log."""
    try:
        answer = json.loads((printed.splitlines() or [""])[-1])
        figures = {name: float(answer[name]) for name in ("gb_per_s", "copy_gb_per_s", "block_s")}
        is_right = answer["is_right"]
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        figures = {}
    if not figures or not all(0 < figure < math.inf for figure in figures.values()):
        return RateReading(problem="its result cannot be read")
    if is_right is not True:
        return RateReading(problem="the bytes that were read are not those that were written")
    return RateReading(figures["gb_per_s"], figures["copy_gb_per_s"], figures["block_s"], transports=protocols(log))


def protocols(log: str) -> tuple[str, ...]:
    """UCX's protocols for reads of large blocks from another process, as in `cma/memory (zero-copy)`.

    Args:
        log: with UCX_PROTO_INFO=y. A table per peer and operation has a row per range of sizes, the largest last.
    """
    found, place, is_read = [], "", False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].split("|")]
        if " cfg#" in line:
            place, is_read = cells[0], False
        elif "remote memory read by ucp_get" in line:
            is_read = " self " not in f"{place} "
        elif is_read and len(cells) > 2 and cells[0].endswith("..inf"):
            found.append(f"{cells[2]} ({cells[1]})")
    return tuple(dict.fromkeys(found))


def active_cards(folder: Path) -> dict[str, float]:
    """RDMA device -> GB/s of its active ports.

    Args:
        folder: the kernel's, with a folder per device and `ports/N/state` and `ports/N/rate` in it.
    """
    rates: dict[str, float] = {}
    for port in sorted(folder.glob("*/ports/*")):
        state, rate = (_text(port / name) for name in ("state", "rate"))
        found = re.match(r"([\d.]+) Gb/sec", rate)
        if _ACTIVE in state and found:
            device = port.parts[-3]
            rates[device] = rates.get(device, 0.0) + float(found[1]) / 8
    return rates


def _fastest_card(folder: Path) -> float | None:
    speeds = [_text(card / "speed") for card in folder.glob("*") if card.name != "lo"]
    return max((int(speed) / 8000 for speed in speeds if speed.isdigit()), default=None)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # a card that is down does not tell its speed
        return ""


def judge_transport(reading: TransportReading) -> list[Finding]:
    """Rates relative to a plain copy, and to the network card."""
    return [_judge_here(reading.here), _judge_network(reading)]


def _judge_here(here: RateReading) -> Finding:
    name = "NIXL on this machine"
    if here.problem:
        fix = "look at UCX_TLS and NIXL's variables; in a container, at its limits and /dev/shm"
        return Finding(name, Verdict.WRONG, here.problem, fix)
    share = here.gb_per_s / here.copy_gb_per_s
    found = f"{_shown(here)}; {share:.0%} of a plain copy ({here.copy_gb_per_s:.1f} GB/s)"
    if share < _GOOD_SHARE_OF_COPY:
        fix = "leave UCX_TLS unset, so that UCX may use shared memory (cma needs CAP_SYS_PTRACE or the same user)"
        return Finding(name, Verdict.SLOW, found, fix)
    return Finding(name, Verdict.OK, found)


def _judge_network(reading: TransportReading) -> Finding:
    rate, name = reading.over_network, "NIXL over RDMA" if reading.cards else "NIXL over TCP"
    if rate.problem:
        fix = "see k8s/components/rdma: devices, IPC_LOCK and the limit of locked memory"
        return Finding(name, Verdict.WRONG, rate.problem, fix)
    found = _shown(rate)
    if reading.cards:
        most = max(reading.cards.values())
        found += f"; {rate.gb_per_s / most:.0%} of a card ({', '.join(reading.cards)}: {most:.1f} GB/s)"
        if rate.gb_per_s < _GOOD_SHARE_OF_CARD * most:
            fix = "compare ib_read_bw; choose cards near the GPUs with UCX_NET_DEVICES"
            return Finding(name, Verdict.SLOW, found, fix)
        return Finding(name, Verdict.OK, found)
    card = reading.fastest_card_gb_per_s
    found += "; there is no active RDMA device" + (f", the network card has {card:.1f} GB/s" if card else "")
    if card and rate.gb_per_s < _GOOD_SHARE_OF_CARD * card:
        fix = "for several machines: network cards with RDMA, and k8s/components/rdma; not needed on one machine"
        return Finding(name, Verdict.SLOW, found, fix)
    return Finding(name, Verdict.OK, found)


def _shown(rate: RateReading) -> str:
    by = f" by {', '.join(rate.transports)}" if rate.transports else ""
    return f"{rate.gb_per_s:.1f} GB/s in blocks of 1 MB{by}, one block in {rate.block_s * 1e6:.0f} us"
