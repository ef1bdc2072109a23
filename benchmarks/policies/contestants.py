"""Who takes part: our policies, the rivals with their best companions, references, and ours without one term each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampd.errors import UserError
from ampd.policies import defaults
from benchmarks.policies.contest import Contestant

OURS = Contestant("ours", "predictive", "on-time", "slack", "predictive", binding="predictive", moves=defaults.MOVES)
OURS_STATIC = replace(OURS, label="ours with fixed roles", pools="static")
COLOCATED_OURS = Contestant(
    "co-located ours",
    "always-local",
    "on-time",
    "slack",
    binding="predictive",
    is_colocated=True,
    moves=defaults.MOVES,
)
"""Our parts on machines that all do both phases: the strongest rival that is known."""
OUR_PARTS = (OURS, OURS_STATIC, COLOCATED_OURS)

_WIDE = "ampd(window=32)"
AMPD = Contestant("ampd", "ampd", "ampd")
ALWAYS_REMOTE = Contestant("always-remote", "always-remote")

RIVALS = (
    AMPD,
    Contestant("ampd window 32", "ampd", _WIDE),
    ALWAYS_REMOTE,
    Contestant("remote window 32", "always-remote", _WIDE),
    Contestant("remote hrrn", "always-remote", "hrrn"),
    Contestant("remote shortest first", "always-remote", "shortest-prefill-first"),
    Contestant("remote jct", "always-remote", "jct"),
    Contestant("remote continuum", "always-remote", "continuum"),
    Contestant("remote laps order", "always-remote", "laps"),
    Contestant("random remote", "always-remote(choice=random)"),
    Contestant("always-local", "always-local"),
    Contestant("threshold", "threshold"),
    Contestant("first-remote", "first-remote"),
    Contestant("table", "table", is_fitted=True),
    Contestant("deflection", "deflection", slicing="itl-chunks"),
    Contestant("deflection window 32", "deflection", _WIDE, slicing="itl-chunks"),
    Contestant("arrow", "arrow", pools="arrow", binding="arrow"),
    Contestant("laps", "laps", "laps", pools="laps"),
    Contestant("kairos", "always-remote", "kairos"),
    Contestant("taichi", "taichi", slicing="taichi", binding="taichi", are_mixed=True),
)
"""On the same split of the machines as ours. Earliest deadline first is left out: with one TTFT target it is first come
first served."""

COLOCATED = Contestant("co-located", "always-local", is_colocated=True)
REFERENCES = (
    COLOCATED,
    Contestant("co-located window 32", "always-local", _WIDE, is_colocated=True),
    Contestant("co-located continuum", "always-local", "continuum", is_colocated=True),
    Contestant("co-located mixed passes", "always-local", slicing="dynaserve", is_colocated=True),
)
"""Every machine does both phases."""

ALL = (*OUR_PARTS, *RIVALS, *REFERENCES)

ABLATION = (
    OURS_STATIC,
    replace(OURS, label="slicing whole", slicing="whole"),
    replace(OURS, label="ordering fcfs", ordering="fcfs"),
    replace(OURS, label="ordering ampd window 32", ordering=_WIDE),
    replace(OURS, label="routing always-remote", routing="always-remote"),
    replace(OURS, label="no share for the late", ordering="on-time(late_share=0)"),
    replace(OURS, label="no long prefill local while decoding", routing="predictive(least_share=1)"),
    replace(OURS, label="no spread", routing="predictive(spread=0)"),
)
"""Ours with one term less."""


def named(labels: Sequence[str], flag: str) -> list[Contestant]:
    """Contestants by their labels.

    Raises:
        UserError: an unknown one; the line names `flag` and lists the known ones.
    """
    known = {each.label: each for each in ALL}
    for label in labels:
        if label not in known:
            raise UserError(f"{flag}: unknown contestant {label!r}; known: {'; '.join(known)}")
    return [known[label] for label in labels]
