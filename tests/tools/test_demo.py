"""The load of `make demo` tells the systems apart, whatever the arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from ampd import simulate
from ampd.cli.serve.settings import EngineName
from tools.demo import SCENES, TRACE

SCENE = SCENES[EngineName.MODELLED]


def _flags(words: Sequence[str]) -> dict[str, str]:
    return {name.removeprefix("--"): value for name, value in pairwise(words) if name.startswith("--")}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_system_serves_the_demos_load_differently(seed: int) -> None:
    shares = {}
    for name, own in SCENE.systems.items():
        serve, replay = _flags([*SCENE.serve, *own]), _flags(SCENE.replay)
        groups = {role: f"{serve[role]}xTP{serve['tp']}" for role in ("prefill", "decode")}
        groups = {role: "0" if text.startswith("0x") else text for role, text in groups.items()}
        kinds = ("routing", "ordering", "slicing", "pools", "perf")
        named = {kind: serve[kind] for kind in kinds if kind in serve}
        flags: dict[str, Any] = {**groups, **named, "ttft": float(serve["ttft"]), "itl": float(serve["itl"])}
        flags["max_wait"] = float(serve["max-wait"])
        run = simulate(TRACE, **flags, rate=float(replay["rate"]), limit=int(replay["limit"]), seed=seed)
        shares[name] = run.attainment.rounds or 0.0
    assert shares["AMPD"] > 0.97
    assert shares["AMPD"] - shares["co-located"] > 0.05
    assert shares["co-located"] - shares["always remote"] > 0.2
