"""Sessions that may move to another owner between two rounds, against sessions that stay: the same sessions, simulated.

python -m benchmarks.session_moves toolbench qwen3-32b h20 2xTP2 2xTP2 --ttft 0.35 --itl 0.04 --rate 9 --seconds 60
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import get_args

from ampd.types import Moves
from benchmarks.policies.contest import run
from benchmarks.policies.contestants import OURS_STATIC
from benchmarks.policies.one_setting import add_setting, setting_of
from benchmarks.policies.settings import Setting


def row(setting: Setting, rate: float, seed: int, pools: str, moves: Moves) -> str:
    """One run as a row of the table."""
    _, done = run(setting, replace(OURS_STATIC, pools=pools, moves=moves), rate, seed)
    reached = done.attainment(setting.slo)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted((done.moves or {}).items())) or "-"
    shares = f"{reached.rounds:.1%} | {reached.sessions:.1%}"
    return f"| {seed} | {pools} | {moves} | {shares} | {done.role_flips} | {reasons} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_setting(parser)
    parser.add_argument("--pools", default="static", help="pools policies, separated by commas")
    given = parser.parse_args()
    setting = setting_of(given)
    print("| seed | pools | moves | rounds | sessions | changes of roles | moves by reason |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for seed in range(1, given.seeds + 1):
        for pools in given.pools.split(","):
            for moves in get_args(Moves):
                print(row(setting, given.rate, seed, pools, moves), flush=True)


if __name__ == "__main__":
    main()
