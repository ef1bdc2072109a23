"""What of the CPU time of bursts is due to tokens, and what to rounds."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.coordinator_overhead import split_cpu_us


def test_cpu_time_is_split_into_that_of_tokens_and_that_of_rounds() -> None:
    options = argparse.Namespace(requests=50, output_tokens=16, long_tokens=300)
    per_token_s, per_round_s = 40e-6, 3e-3
    short_s, long_s = (50 * (per_round_s + tokens * per_token_s) for tokens in (16, 300))
    assert split_cpu_us(short_s, long_s, options) == pytest.approx((40, 3000))
