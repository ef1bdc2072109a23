"""Explains a plan in a few sentences: what was found, how sure it is and what limits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ampd.reports import counted, format_number
from planner.layout.candidate import Candidate, Figure
from planner.layout.fluid import Demand, memory_needs
from planner.layout.layout import PlanCase
from planner.layout.plan import MORE_LOAD, Plan
from planner.layout.trial import Trial

BINDS = {
    "prefill": "the time to the first token (prefill capacity)",
    "decode": "the time between tokens (decode capacity)",
    "sessions": "the delay of sessions, which end too late although their rounds count as met",
    "context": "the length of contexts, because the longest ones fit no replica or are too long for the model",
    "kv_memory": "the KV memory of the replicas that own sessions",
    "host_memory": "the host memory of their KV stores",
    "unknown": "not known, because no simulation of a higher rate shows it",
}
_MEMORIES = ("kv_memory", "host_memory")
_TIGHT = 1.05
"""A memory with less than this many times the need binds, if sessions lost their KV."""


@dataclass(frozen=True, slots=True)
class Slack:
    """How far a layout is from each limit: what it has, divided by what it needs (1: no reserve).

    Attributes:
        prefill, decode: the target divided by the simulated P95, of the TTFT and of the rounds' mean ITL. None: the
            simulation has no such value.
        kv_memory, host_memory: with KV stores, KV memory holds the running rounds, and host memory the resident
            sessions. Without stores KV memory holds the sessions, and `host_memory` is None. Below 1 some KV of idle
            sessions is dropped and computed again, so this alone says nothing about the rate.
        gpus_left: GPUs that the layout does not use.
        binds: what keeps the layout from a higher rate, as a key of `BINDS`.
    """

    prefill: float | None
    decode: float | None
    kv_memory: float
    gpus_left: int
    binds: str
    host_memory: float | None = None


def slack_of(candidate: Candidate, plan: Plan, case: PlanCase, demand: Demand) -> Slack:
    """The slack of a layout at the plan's rate."""
    owners = [*candidate.layout.decode, *candidate.layout.mixed]
    reserves = [
        sum(tokens[n] * count for n, count in owners) / need if need else float("inf")
        for tokens, need in memory_needs(case.kv_capacity_tokens, case.kv_store_tokens, demand)
    ]
    kv_memory, *host_memory = reserves
    simulated = candidate.simulated(plan.rate)
    return Slack(
        _over(case.slo.ttft_s, simulated["ttft_s"]["p95"]),
        _over(case.slo.itl_s, simulated["mean_itl_s"]["p95"]),
        kv_memory,
        case.gpus - candidate.layout.gpus,
        _binding(candidate, plan, reserves),
        *host_memory,
    )


def p95_over_target(candidate: Candidate, rate: float, case: PlanCase) -> float:
    """The simulated P95 of TTFT and of the rounds' mean ITL, each divided by its target: the larger of the two."""
    simulated = candidate.simulated(rate)
    ttft_s, itl_s = (simulated[key]["p95"] or 0.0 for key in ("ttft_s", "mean_itl_s"))
    return max(ttft_s / case.slo.ttft_s, itl_s / case.slo.itl_s)


def headroom_of(candidate: Candidate, rate: float) -> float | None:
    """The rate that a layout carries, divided by the plan's rate; None: it is not known."""
    return candidate.most / rate if candidate.seeds else None


def sentences(plan: Plan, case: PlanCase, left_out: Mapping[int, str], slack: Slack | None) -> list[str]:
    """The explanation of the best layout, one sentence per line.

    Args:
        left_out: unusable degrees with the reasons.
        slack: of the best layout; None: there is none.
    """
    lines = []
    for reason in dict.fromkeys(left_out.values()):
        degrees = ", ".join(f"TP{degree}" for degree in left_out if left_out[degree] == reason)
        lines.append(f"{degrees} left out: {reason}.")
    lines.append(answer(plan, case))
    if slack is not None:
        best = plan.layouts[0]
        lines += [_attained(plan, best), _binds(slack, best, plan, case)]
        if more := best.at_load(MORE_LOAD * plan.rate):
            share = Figure.of([trial.met for trial in more], most=1.0)
            carried = "is carried too" if best.most >= MORE_LOAD * plan.rate else "is not carried"
            lines.append(f"20 % more load {carried}: {_share(share)} of the rounds are attained then.")
    if plan.stopped:
        lines.append(f"The search ended early, because {plan.stopped}: this is what was found until then.")
    return lines


def shortfall(headroom: float | None, attainment: float) -> str:
    """The end of a sentence about a layout that misses the plan's rate: how much it misses."""
    if headroom is not None and 0 < headroom < 1:
        return f"carries {headroom:.0%} of the rate, and attains {attainment:.1%} of the rounds"
    return f"attains {attainment:.1%} of the rounds"


def rate_text(rate: float) -> str:
    """A rate that a user gave, or that was made round."""
    return format_number(rate, 6)


def answer(plan: Plan, case: PlanCase) -> str:
    """The answer in one line: the layout, and what it carries."""
    wanted = f"{case.attainment:.0%} of the rounds within both targets, and nearly all sessions in time"
    if not plan.layouts:
        return f"No layout of {counted(case.gpus, 'GPU')} carries any rate that was tried with {wanted}."
    best = plan.layouts[0]
    part = ""
    if plan.scale > 1:
        part = f" It is {plan.scale} times the best layout of 1/{plan.scale} of the cluster, and "
        part += "the whole was not simulated." if best.whole is None else "the whole was simulated once."
    rate = f"{rate_text(plan.rate)} sessions/s"
    if plan.has_fewest_gpus and plan.carries:
        return f"{best.layout} has the fewest GPUs that were found to carry {rate}: {wanted}.{part}"
    if plan.carries and best.seeds:
        return f"{best.layout} carries the most that was found on {counted(case.gpus, 'GPU')}: {wanted}.{part}"
    if plan.carries:
        return f"{best.layout} carries {rate} in one simulation: {wanted}.{part}"
    miss = shortfall(headroom_of(best, plan.rate), best.attainment(plan.rate).mean)
    return (
        f"No layout of {counted(case.gpus, 'GPU')} was found to carry {rate} with {wanted}. "
        f"The closest one, {best.layout}, {miss}.{part}"
    )


def _attained(plan: Plan, best: Candidate) -> str:
    text = f"At {rate_text(plan.rate)} sessions/s it attains {_share(best.attainment(plan.rate))}"
    goodput = best.figure()
    if goodput is None:
        return f"{text}. What it carries at most is not known."
    text += f", and it carries up to {_rate(goodput)} sessions/s."
    if plan.carries and goodput.low is not None and goodput.low < plan.rate:
        text += f" The interval reaches below {rate_text(plan.rate)}: with other sessions the rate may fail."
    return text


def _binds(slack: Slack, best: Candidate, plan: Plan, case: PlanCase) -> str:
    line = f"What binds is {BINDS[slack.binds]}"
    if (over := _first_failure(best, plan.rate)) is not None:
        rate, trial = over
        line += f": at {format_number(rate)} sessions/s {trial.late:.0%} of the rounds miss TTFT"
        line += f" and {trial.slow:.0%} miss ITL"
        if trial.refused:
            line += f", and {trial.refused:.0%} are refused or never come after a refusal"
        if slack.binds == "sessions":
            line += f", and {1 - trial.in_time:.1%} of the sessions are too late"
    memory = f"{slack.kv_memory:.1f} times the KV memory"
    if slack.host_memory is not None:
        memory += f" and {slack.host_memory:.1f} times the host memory"
    left = f"; {slack.gpus_left} of {case.gpus} GPUs are not used" if slack.gpus_left else ""
    if lost := best.simulated(plan.rate)["lost_sessions"]:
        left = f"; in the simulation KV of waiting sessions was dropped {lost} times, and computed again{left}"
    return f"{line}. By an estimate the layout has {memory} that all KV of the sessions takes{left}."


def _binding(best: Candidate, plan: Plan, reserves: list[float]) -> str:
    if (over := _first_failure(best, plan.rate)) is None:
        return "unknown"
    if best.simulated(plan.rate)["lost_sessions"]:
        tight = [name for name, reserve in zip(_MEMORIES, reserves, strict=False) if reserve < _TIGHT]
        if tight:
            return tight[0]
    trial = over[1]
    # A trial that was stopped knows only how many rounds are met at most.
    if (trial.met if trial.is_whole else trial.most) >= best.attainment_level:
        return "sessions"
    if trial.refused > max(trial.late, trial.slow):
        return "context"
    return "prefill" if trial.late >= trial.slow else "decode"


def _first_failure(best: Candidate, plan_rate: float) -> tuple[float, Trial] | None:
    """The lowest rate above the goodput that its trial with the first seed shows to be too high."""
    carried = best.most if best.seeds else plan_rate if best.carries(plan_rate) else 0.0
    failing = (point for point in best.curve() if point[0] > carried and not point[1].carries(best.attainment_level))
    return next(failing, None)


def _share(figure: Figure) -> str:
    if figure.low is None or figure.high is None:
        return f"{figure.mean:.1%}"
    return f"{figure.mean:.1%} ({figure.low:.1%} to {figure.high:.1%})"


def _rate(figure: Figure) -> str:
    mean, low, high = (format_number(value) for value in (figure.mean, figure.low, figure.high))
    return mean if figure.low is None else f"{mean} ({low} to {high}, {figure.seeds} seeds)"


def _over(target_s: float, seconds: float | None) -> float | None:
    return target_s / seconds if seconds else None
