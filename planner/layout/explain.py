"""Explains a plan: which resource limits it, what more GPUs would gain, and which degrees do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.layout.formulation import Capacities, Choice, Demand
from planner.layout.layout import Layout
from planner.layout.search import Plan

_WORDS = {
    "prefill": "prefill capacity",
    "decode": "decode capacity",
    "kv_memory": "the KV memory of the decode replicas",
    "host_memory": "the host memory of the decode replicas' KV stores",
    "idle_prefill": "the time of a prefill on an idle replica (only a larger degree or shorter prompts lower it)",
    "idle_decode": "the time of a decode step on an idle replica (only a larger degree lowers it)",
    "grid": "nothing: it is the lowest level that was looked at",
}
_MEMORIES = ("kv_memory", "host_memory")
_TIGHT = 1.05
"""A resource with less than this many times the need limits the layout."""


@dataclass(frozen=True, slots=True)
class Slack:
    """How far a layout is from each limit: its capacity over the demand (1: no reserve).

    Attributes:
        kv_memory, host_memory: with KV stores, KV memory must hold the running rounds, and host memory the resident
            sessions. Without stores KV memory must hold the sessions, and `host_memory` is None.
        gpus_left: GPUs that the layout does not use.
        binds: the resource that keeps the layout from a lower latency level, as a key of `_WORDS`.
    """

    prefill: float
    decode: float
    kv_memory: float
    gpus_left: int
    binds: str
    host_memory: float | None = None


def slack_of(choice: Choice, capacities: Capacities, demand: Demand, gpus: int) -> Slack:
    """The slack of a layout at the level that it reaches."""
    layout, level = choice.layout, choice.level
    kv_memory, *host_memory = (
        sum(tokens[n] * count for n, count in layout.decode) / need if need else float("inf")
        for tokens, need in capacities.memory_needs(demand)
    )
    prefill, decode = _carried(layout, capacities, level)
    return Slack(
        prefill / demand.rate,
        decode / demand.rate,
        kv_memory,
        gpus - layout.gpus,
        _tight_memory(kv_memory, *host_memory) or _binding(choice, capacities, demand),
        *host_memory,
    )


def _tight_memory(*reserves: float) -> str | None:
    """The first kind of memory that limits the layout."""
    return next((name for name, reserve in zip(_MEMORIES, reserves, strict=False) if reserve < _TIGHT), None)


def _carried(layout: Layout, capacities: Capacities, level: int) -> tuple[float, float]:
    """Sessions per second of the prefill and of the decode replicas at a level."""
    return (
        sum(capacities.prefill[n][level] * count for n, count in layout.prefill),
        sum(capacities.decode[n][level] * count for n, count in layout.decode),
    )


def _binding(choice: Choice, capacities: Capacities, demand: Demand) -> str:
    """The resource that is too small one level lower, or at the level itself if the layout misses the demand."""
    misses = choice.headroom < 1
    if not misses and choice.level == 0:
        return "grid"
    level = choice.level if misses else choice.level - 1
    carried = dict(zip(("prefill", "decode"), _carried(choice.layout, capacities, level), strict=True))
    phase = min(carried, key=lambda name: carried[name])
    if carried[phase] >= demand.rate:
        return "grid"
    table = capacities.prefill if phase == "prefill" else capacities.decode
    return phase if any(table[n][level] for n in capacities.degrees) else f"idle_{phase}"


def sentences(plan: Plan, gpus: int, left_out: Mapping[int, str]) -> list[str]:
    """The explanation of the best layout, one sentence per line; `left_out`: unusable degrees with the reasons."""
    capacities, demand = plan.capacities, plan.demand
    lines = []
    for reason in dict.fromkeys(left_out.values()):
        degrees = ", ".join(f"TP{degree}" for degree in left_out if left_out[degree] == reason)
        lines.append(f"{degrees} left out: {reason}.")
    if not plan.layouts:
        return lines
    best = plan.layouts[0].choice
    slack, level = slack_of(best, capacities, demand, gpus), capacities.levels[best.level]
    lines.append(
        f"At {demand.rate:g} sessions/s the slower phase's P95 is at most {level:.2f} of its target; at that level the "
        f"layout carries {best.headroom:.2f} times the rate."
    )
    if level > 1 or best.headroom < 1:
        lines.append(_miss(plan, level, best.headroom))
    memory = f"{slack.kv_memory:.1f} times the KV memory"
    if slack.host_memory is not None:
        memory += f" and {slack.host_memory:.1f} times the host memory"
    lines.append(
        f"What binds is {_WORDS[slack.binds]}. At its level the layout has {slack.prefill:.2f} times the prefill and "
        f"{slack.decode:.2f} times the decode capacity that is needed, and {memory}; "
        f"{slack.gpus_left} of {gpus} GPUs are not used."
    )
    if refused := plan.layouts[0].simulated["errors"]:
        lines.append(
            f"In the check {refused} rounds were refused, because their context is longer than the model or a decode "
            "replica's KV memory takes; each ended its session, and counts as missed with the rounds that never came."
        )
    if plan.next_step is not None:
        lines.append(_next(plan, *plan.next_step, level))
    return lines


def meets(choice: Choice, capacities: Capacities) -> bool:
    """Whether a layout carries the rate with both P95 within their targets."""
    return choice.headroom >= 1 and capacities.levels[choice.level] <= 1.0


def shortfall(level: float, headroom: float) -> str:
    """The end of a sentence: how far P95 is above its target, or the rate that the layout carries if it is lower."""
    return f"misses by {level - 1:.0%}" if headroom >= 1 else f"carries {headroom:.0%} of the rate"


def _miss(plan: Plan, level: float, headroom: float) -> str:
    miss = shortfall(level, headroom)
    # The first layout attains most in the simulation. The programme may rate another one higher.
    other = next((checked.choice.layout for checked in plan.layouts if meets(checked.choice, plan.capacities)), None)
    if other is not None:
        return f"Replica by replica it {miss} and {other} meets the targets at P95, but attains no more in the check."
    if not any(checked.choice.headroom >= 1 for checked in plan.layouts):
        return f"No layout carries the rate at any level: this one {miss.replace('the rate', 'it')}."
    return f"No layout meets the targets at P95: this one {miss}."


def _next(plan: Plan, step: int, choice: Choice, level: float) -> str:
    after = plan.capacities.levels[choice.level]
    best = max((checked.choice for checked in plan.layouts), key=lambda found: (-found.level, found.headroom))
    gpus = "GPU" if step == 1 else "GPUs"
    if choice.level == best.level and choice.headroom <= best.headroom * 1.001:
        return f"The next {step} {gpus} would buy nothing: no larger layout is better by this measure."
    bought = f"The next {step} {gpus} would buy {choice.layout}:"
    if f"{after:.2f}" == f"{level:.2f}":
        return f"{bought} {choice.headroom:.2f} instead of {best.headroom:.2f} times the rate, P95 as before."
    return (
        f"{bought} P95 at {after:.2f} instead of {level:.2f} of the target, {choice.headroom:.2f} times the rate at "
        "that level."
    )
