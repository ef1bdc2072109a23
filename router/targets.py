"""A round's latency targets: the graph's own, or the client's within the graph's limits."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampd.types import Slo
from router.round_errors import RoundRefusedError

TARGET_FLOOR = 0.5
TARGET_CAP = 10.0

_MS_PER_S = 1000
_NAMES = ("ttft_target", "itl_target")


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """The graph's default targets, and how far a client may depart from them.

    A target outside of the limits becomes the nearest limit. The limits exist because a worker's rounds share it: a
    very tight target of one round delays the prefills of the others, and a very loose one makes its own prefill wait.

    Attributes:
        default: the targets of rounds that bring none.
        floor: tightest target, as a multiple of the default.
        cap: loosest target, as a multiple of the default.
    """

    default: Slo
    floor: float = TARGET_FLOOR
    cap: float = TARGET_CAP

    def of(self, request: Mapping[str, Any]) -> tuple[Slo, tuple[str, ...]]:
        """The targets of one request, and which of `ttft_target` and `itl_target` are outside of the graph's limits.

        Args:
            request: Dynamo's preprocessed request: `nvext.router` has targets in milliseconds, each optional.

        Raises:
            RoundRefusedError: 400 because a target is no positive number.
        """
        asked = {**_annotated(request), **(request.get("router") or {})}
        chosen: list[float] = []
        clamped: list[str] = []
        for name, default_s in zip(_NAMES, (self.default.ttft_s, self.default.itl_s), strict=True):
            asked_s = _seconds(asked, name)
            if asked_s is None:
                chosen.append(default_s)
                continue
            chosen.append(min(max(asked_s, self.floor * default_s), self.cap * default_s))
            if chosen[-1] != asked_s:
                clamped.append(name)
        return Slo(*chosen), tuple(clamped)


def _annotated(request: Mapping[str, Any]) -> dict[str, Any]:
    """Targets in `nvext.annotations`, as `ttft_target:350`: for completions Dynamo's frontend drops `nvext.router`."""
    targets: dict[str, Any] = {}
    for annotation in request.get("annotations") or ():
        name, sign, value = str(annotation).partition(":")
        if sign and name in _NAMES:
            try:
                targets[name] = float(value)
            except ValueError:
                targets[name] = value
    return targets


def _seconds(targets: Mapping[str, Any], name: str) -> float | None:
    value = targets.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        message = f"nvext.router.{name} must be a positive number of milliseconds (given: {str(value)[:64]!r})"
        raise RoundRefusedError(400, message)
    # An integer may be larger than any float.
    return min(value, sys.float_info.max) / _MS_PER_S
