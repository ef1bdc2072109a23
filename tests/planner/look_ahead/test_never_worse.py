"""Recorded sessions, served with the roles of a start and with a look ahead: what the changes cost at most.

The cases are simulated ones in which nothing depends on chance. They do not prove that a look ahead never loses.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from ampd.cli.main import main

CUSTOMER_SERVICE = "tau-bench-airline --model qwen3-32b --gpu h200 --limit 300 --ttft 0.6 --itl 0.03 --jobs 1"
COLOCATED = "--prefill 0 --decode 4xTP1"
EVEN = "--prefill 2xTP1 --decode 2xTP1"


class Attained(NamedTuple):
    rounds: float
    sessions: float
    role_changes: int


def served(capsys: pytest.CaptureFixture[str], start: str, rate: float, seed: int) -> tuple[Attained, Attained]:
    """With fixed roles, and with a look ahead."""
    flags = f"{CUSTOMER_SERVICE} {start} --rate {rate} --seed {seed} --pools static,look-ahead --json"
    assert main(["simulate", *flags.split()]) == 0
    static, looking = json.loads(capsys.readouterr().out)["results"]
    return attained(static), attained(looking)


def attained(result: dict[str, object]) -> Attained:
    shares = result["attainment"]
    assert isinstance(shares, dict)
    return Attained(shares["rounds"], shares["sessions"], int(str(result["role_flips"])))


@pytest.mark.slow
def test_workers_that_are_co_located_at_the_start_lose_little_while_they_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One of them becomes a prefill worker, which serves this load better in the end.

    While it still decodes, the others have to keep the prefills that it would serve too late.
    """
    static, looking = served(capsys, COLOCATED, 3.0, 2)
    assert looking.role_changes
    assert looking.rounds > static.rounds - 0.02
    assert looking.sessions > static.sessions - 0.08


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_an_even_split_that_carries_its_load_loses_nothing(capsys: pytest.CaptureFixture[str], seed: int) -> None:
    static, looking = served(capsys, EVEN, 3.0, seed)
    assert looking.rounds > static.rounds - 0.002
    assert looking.sessions > static.sessions - 0.005


@pytest.mark.slow
def test_an_even_split_that_is_too_small_gains(capsys: pytest.CaptureFixture[str]) -> None:
    static, looking = served(capsys, EVEN, 6.0, 0)
    assert looking.sessions > static.sessions + 0.3
