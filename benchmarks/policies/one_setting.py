"""The flags of benchmarks that simulate one setting at one rate."""

from __future__ import annotations

import argparse

from benchmarks.policies.settings import Setting


def add_setting(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a setting, a rate and seeds."""
    parser.add_argument("trace")
    parser.add_argument("model")
    parser.add_argument("gpu")
    parser.add_argument("prefill", help="replicas, as 2xTP2; 0: none")
    parser.add_argument("decode")
    parser.add_argument("--ttft", type=float, required=True)
    parser.add_argument("--itl", type=float, required=True)
    parser.add_argument("--rate", type=float, required=True, help="sessions per second")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the arrivals")
    parser.add_argument("--seeds", type=int, default=1)


def setting_of(given: argparse.Namespace) -> Setting:
    """The setting that the flags name."""
    return Setting(
        given.model, given.gpu, given.trace, given.prefill, given.decode, given.ttft, given.itl, given.seconds
    )
