"""Explains a plan from the trials that decided it: what it carries, what binds, and what the next GPUs would buy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ampd.reports.figures import format_number
from planner.layout.appraisal import Appraised, Figure, Varied
from planner.layout.case import PlanCase
from planner.layout.demand import memory_needs
from planner.layout.goodput import PRECISION
from planner.layout.plan import GoodputPlan, NextStep
from planner.layout.trial import Trial

BINDS = {
    "prefill": "the time to the first token (prefill capacity)",
    "decode": "the time between tokens (decode capacity)",
    "sessions": "the delay of sessions, which end too late although their rounds count as met",
    "context": "the length of contexts, because the longest ones fit no replica or are too long for the model",
    "kv_memory": "the KV memory of the replicas that own sessions",
    "host_memory": "the host memory of their KV stores",
    "nothing": "nothing that was simulated: no rate was too high",
    "unknown": "not known, because no trial of a higher rate shows it",
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


def slack_of(appraised: Appraised, plan: GoodputPlan, case: PlanCase) -> Slack:
    """The slack of a layout at the plan's rate."""
    owners = [*appraised.layout.decode, *appraised.layout.mixed]
    kv_memory, *host_memory = (
        sum(tokens[n] * count for n, count in owners) / need if need else float("inf")
        for tokens, need in memory_needs(case.kv_capacity_tokens, case.kv_store_tokens, plan.demand)
    )
    simulated = appraised.simulated
    return Slack(
        _over(case.slo.ttft_s, simulated["ttft_s"]["p95"]),
        _over(case.slo.itl_s, simulated["mean_itl_s"]["p95"]),
        kv_memory,
        case.gpus - appraised.layout.gpus,
        _binding(appraised, plan, _tight_memory(appraised, kv_memory, *host_memory)),
        *host_memory,
    )


def p95_over_target(appraised: Appraised, case: PlanCase) -> float:
    """The simulated P95 of TTFT and of the rounds' mean ITL, each divided by its target: the larger of the two."""
    ttft_s, itl_s = (appraised.simulated[key]["p95"] or 0.0 for key in ("ttft_s", "mean_itl_s"))
    return max(ttft_s / case.slo.ttft_s, itl_s / case.slo.itl_s)


def sentences(plan: GoodputPlan, case: PlanCase, left_out: Mapping[int, str]) -> list[str]:
    """The explanation of the best layout, one sentence per line; `left_out`: unusable degrees with the reasons."""
    lines = []
    for reason in dict.fromkeys(left_out.values()):
        degrees = ", ".join(f"TP{degree}" for degree in left_out if left_out[degree] == reason)
        lines.append(f"{degrees} left out: {reason}.")
    best = plan.layouts[0]
    lines += [_found(plan, case), _attained(plan, best)]
    lines.append(_binds(slack_of(best, plan, case), best, plan, case))
    if refused := best.simulated["errors"]:
        lines.append(
            f"{refused} rounds were refused in the simulation, because their context is longer than the model or a "
            "replica's KV memory takes. Each ended its session, and counts as missed with the rounds that never came."
        )
    if plan.variations:
        changes = "; ".join(_varied(each, plan.attainment) for each in plan.variations)
        part = f" (of 1/{plan.scale} of the cluster)" if plan.scale > 1 else ""
        lines.append(f"Attainment{part} at {rate_text(plan.rate)} sessions/s if the circumstances differ: {changes}.")
    if plan.fuller is not None:
        layout, shown = plan.fuller
        unused = case.gpus - best.layout.gpus
        remain = f"{gpus_text(unused)} {'remains' if unused == 1 else 'remain'} unused"
        lines.append(f"{remain}, because more replicas are no better in simulations: {layout} {shown}.")
    if plan.next_step is not None:
        lines.append(_next(plan.next_step))
    if plan.tied:
        lines.append(_tied(plan))
    lines += _higher_below(plan)
    if plan.stopped and plan.is_decided:
        lines.append(f"Some figures are missing, because {plan.stopped}. The search itself was complete.")
    elif plan.stopped:
        lines.append(
            f"The search ended early, because {plan.stopped}. These are the best layouts after {plan.trials} "
            f"{'simulation' if plan.trials == 1 else 'simulations'}."
        )
    elif not plan.is_decided:
        lines.append(
            "The search or the comparison of its best layouts was cut short, because the figures need time too. So a "
            "longer search (--budget-s) may choose another one."
        )
    return lines


def summary(plan: GoodputPlan) -> str:
    """The answer in one line: GPUs, layout, what it carries, and whether it has a reserve."""
    best = plan.layouts[0]
    rate, goodput = rate_text(plan.rate), best.goodput
    if best.carries_rate:
        outcome = f"carries {rate} sessions/s"
    elif goodput is not None:
        rated = "that were asked for" if plan.has_fewest_gpus else "at which it was judged"
        outcome = f"carries {format_number(goodput.mean)} sessions/s, less than the {rate} {rated}"
    else:
        outcome = f"does not carry {rate} sessions/s"
    more = next((each for each in plan.variations if each.variation.rate > 1), None)
    if not plan.is_checked:
        outcome += " by simulations of a part, and the whole was not simulated"
    elif best.carries_rate and more is not None:
        outcome += f", and {more.variation.name} too" if more.carries else f", but not {more.variation.name}"
    return f"{gpus_text(best.layout.gpus)}: {best.layout}; {outcome}."


def shortfall(headroom: float | None, attainment: float) -> str:
    """The end of a sentence about a layout that misses the plan's rate: how much it misses."""
    if headroom is not None and 0 < headroom < 1:
        return f"carries {headroom:.0%} of the rate, and attains {attainment:.1%} of the rounds"
    return f"attains {attainment:.1%} of the rounds"


def gpus_text(count: int) -> str:
    """A number of GPUs in words."""
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _found(plan: GoodputPlan, case: PlanCase) -> str:
    best = plan.layouts[0].layout
    if plan.scale > 1:
        return _found_in_part(plan, case)
    if plan.is_estimated:
        return _estimated(plan, case)
    if plan.is_untried:
        return _untried(plan, case)
    wanted = f"{plan.attainment:.0%} of the rounds within both targets, and nearly all sessions in time"
    if plan.carries and plan.has_fewest_gpus:
        return f"{best} has the fewest GPUs that were found to carry {rate_text(plan.rate)} sessions/s: {wanted}."
    if plan.carries:
        return f"{best} carries the most that was found on {gpus_text(case.gpus)}: {wanted}."
    headroom = headroom_of(plan.layouts[0], plan.rate)
    miss = shortfall(headroom, plan.layouts[0].attainment.mean)
    if plan.carried_rate and headroom is None:
        miss = f"carries {format_number(plan.carried_rate)} sessions/s in a short simulation"
        over = first_failure(plan.layouts[0], plan)
        miss += ", but not in a longer one" if over is not None and over[0] <= plan.carried_rate else ""
    none = "No" if plan.is_decided or plan.none_carries else "Until the search ended, no"
    rate = f"{rate_text(plan.rate)} sessions/s"
    if not case.rate and not headroom:
        # No rate was asked for, so the one of the figures is not what is missed.
        rate = f"any rate that was tried, down to {format_number(plan.layouts[0].curve[0][0])} sessions/s,"
        miss += " there" if plan.is_decided else f" at {rate_text(plan.rate)} sessions/s"
    return (
        f"{none} layout of {gpus_text(case.gpus)} was found to carry {rate} with {wanted}. "
        f"The closest one, {best}, {miss}."
    )


def _estimated(plan: GoodputPlan, case: PlanCase) -> str:
    best = plan.layouts[0]
    more = "fewer GPUs" if best.carries_rate else "a layout that carries it"
    if not best.carries_rate and best.layout.gpus == case.gpus:
        more += f", but this one has all {gpus_text(case.gpus)} already"
    check = "carries" if best.carries_rate else "does not carry"
    return (
        f"The search ended before it found a layout for {rate_text(plan.rate)} sessions/s. {best.layout} is a guess "
        f"with a reserve, and {check} the rate in a short simulation. More time may find {more}."
    )


def _untried(plan: GoodputPlan, case: PlanCase) -> str:
    """Of a layout that nothing but the integer programme speaks for."""
    best = plan.layouts[0]
    text = f"The search ended before simulations compared layouts. {best.layout} is a guess of the integer programme"
    if plan.scale > 1:
        text += f", which made it for 1/{plan.scale} of the {gpus_text(case.gpus)}"
        text += "" if plan.is_checked else ". The whole cluster was not simulated, so the figures are those of the part"
    if best.carries_rate:
        rate = rate_text(plan.rate)
        return f"{text}. One simulation says that it carries {rate} sessions/s, and none what it carries at most."
    return f"{text}. No simulation has shown a rate that it carries."


def _found_in_part(plan: GoodputPlan, case: PlanCase) -> str:
    best = plan.layouts[0]
    if plan.is_untried:
        return _untried(plan, case)
    check = "carries" if best.carries_rate or best.is_refuted_by_part else "does not carry"
    goal = "the fewest that carry it" if plan.has_fewest_gpus else "what carries most"
    if plan.is_estimated:
        goal = "the fewest that carry it, and ended with a guess that has a reserve,"
    load, part = f"{case.gpus} GPUs", f"1/{plan.scale} of the GPUs"
    if plan.has_fewest_gpus or plan.is_estimated:
        load += f" and {rate_text(plan.rate)} sessions/s"
        part += f" at 1/{plan.scale} of the rate"
    searched = (
        f"{load} are too many to try layouts one by one. The search looked for {goal} on {part}, and each replica "
        f"found stands for {plan.scale}."
    )
    copies = format_number(plan.copies)
    if plan.copies < plan.scale:
        searched += f" The part carries more than its share, so the whole has only {copies} times its replicas."
    elif plan.copies > plan.scale and not plan.is_enlarged:
        searched += f" The part carries less than its share, so the whole has {copies} times its replicas."
    if plan.filled_gpus:
        searched += f" The {gpus_text(plan.filled_gpus)} that remained got further replicas of the same roles."
    if plan.is_enlarged:
        searched += " By its figures fewer would do, but they did not in simulations of the whole."
    if not plan.is_checked:
        return (
            f"{searched} The whole cluster was not simulated, because {plan.stopped}: the figures of {best.layout} are "
            "those of the part."
        )
    seeds = best.attainment.seeds
    times = "once" if seeds == 1 else f"with {seeds} seeds"
    found = (
        f"{searched} The whole cluster was simulated {times}, with {best.simulated['sessions']} sessions: "
        f"{best.layout} {check} the rate there. Such a short check does not show work that piles up slowly."
    )
    if not plan.is_settled:
        untried = "Fewer copies, which may do," if best.carries_rate else "More copies, which may carry it,"
        found += f" {untried} were not simulated, because {plan.stopped}."
    if best.is_refuted_by_part:
        shown = "less" if best.goodput is None else f"only {format_number(best.goodput.mean)} sessions/s"
        more = "" if best.unfilled is None else ", and the replicas on the GPUs that remained cannot make up for it"
        return f"{found} Long simulations of the part, times {copies}, show {shown}{more}, so that does not count."
    if not best.carries_rate and best.goodput is not None:
        return f"{found} The rate that it carries was found by such short checks too."
    if best.goodput is None:
        return found
    what = "What it carries" if plan.next_step is None else "What it carries, and what more GPUs buy,"
    found += f" {what} is known from long simulations of the part, times {copies}."
    if len(plan.layouts) > 1:
        many = any(each.attainment.seeds > 1 for each in plan.layouts[1:])
        judged = "one simulation" + (" or several" if many else "")
        found += f" The other layouts were judged in the same way, by {judged} of the whole each."
    return found


def headroom_of(appraised: Appraised, rate: float) -> float | None:
    """The rate that a layout carries, divided by the plan's rate; None: it is not known.

    A layout that carries the plan's rate may be known to carry a lower rate or more. That says nothing.
    """
    if appraised.goodput is None:
        return None
    if appraised.carries_rate and appraised.goodput_is_least and appraised.goodput.mean < rate:
        return None
    return appraised.goodput.mean / rate


def _attained(plan: GoodputPlan, best: Appraised) -> str:
    it, text = "it", f"At {rate_text(plan.rate)} sessions/s it attains {_share(best.attainment)}"
    if not plan.is_checked:
        it, rate = "the whole", rate_text(plan.rate / plan.scale)
        text = f"At {rate} sessions/s its part attains {_share(best.attainment)}"
    if best.goodput is None:
        return f"{text}."
    if best.carries_rate and best.attainment.mean < plan.attainment:
        # The time was over before longer simulations at this rate. Those that found the goodput were longer.
        text += " in one short simulation, which longer ones outdo"
    if not best.goodput.mean:
        return f"{text}, and it carries no rate that was tried."
    if best.unfilled is not None and best.unfilled.goodput is not None and not best.unfilled.goodput_is_least:
        return (
            f"{text}. Without the replicas on the GPUs that remained it carries up to {_rate(best.unfilled.goodput)} "
            "sessions/s. Whether it carries more with them, and what more GPUs would buy, was not searched."
        )
    if best.goodput_is_least:
        return (
            f"{text}, and {it} carries at least {_rate(best.goodput)} sessions/s. Higher rates were not tried, so what "
            "more GPUs would buy is not known."
        )
    text += f", and {it} carries up to {_rate(best.goodput)} sessions/s."
    low, rate = best.goodput.low, rate_text(plan.rate)
    if best.carries_rate and low is not None and low < plan.rate:
        text += (
            f" The interval begins below {rate}, so these seeds are too few to show that other sessions at this rate "
            "would be carried too."
        )
    return text


def _binds(slack: Slack, best: Appraised, plan: GoodputPlan, case: PlanCase) -> str:
    without = "" if best.unfilled is None else " without the replicas on the GPUs that remained"
    line = f"What binds{without} is {BINDS[slack.binds]}"
    if (over := first_failure(best, plan)) is not None:
        rate, trial = over
        line += f": at {format_number(rate)} sessions/s {trial.late:.0%} of the rounds miss TTFT"
        line += f" and {trial.slow:.0%} miss ITL"
        if trial.refused:
            line += f", and {trial.refused:.0%} are refused or never come after a refusal"
        if slack.binds == "sessions":
            until = "end too late" if trial.is_whole else "are too late already when the simulation is stopped"
            line += f", and {1 - trial.in_time:.1%} of the sessions {until}"
    memory = f"{slack.kv_memory:.1f} times the KV memory"
    if slack.host_memory is not None:
        memory += f" and {slack.host_memory:.1f} times the host memory"
    left = f"; {slack.gpus_left} of {case.gpus} GPUs are not used" if slack.gpus_left else ""
    if lost := best.simulated["lost_sessions"]:
        left = f"; in the simulation KV of waiting sessions was dropped {lost} times, and computed again{left}"
    return f"{line}. By an estimate the layout has {memory} that all KV of the sessions takes{left}."


def _binding(best: Appraised, plan: GoodputPlan, tight_memory: str | None) -> str:
    over, tried = first_failure(best, plan), best.unfilled or best
    if over is None:
        return "nothing" if tried.goodput_is_least and len(tried.curve) > 1 else "unknown"
    if tight_memory is not None:
        return tight_memory
    trial = over[1]
    # A trial that was stopped knows only how many rounds are met at most.
    if (trial.met if trial.is_whole else trial.most) >= plan.attainment:
        return "sessions"
    if trial.refused > max(trial.late, trial.slow):
        return "context"
    return "prefill" if trial.late >= trial.slow else "decode"


def first_failure(best: Appraised, plan: GoodputPlan) -> tuple[float, Trial] | None:
    """The lowest rate that the layout does not carry and that its trial with the first seed shows to be too high.

    A rate that is carried on average over the seeds is none, even if the first seed alone fails. Of a layout that got
    replicas beside the parts of a large cluster, it is the lowest rate that these parts alone do not carry.
    """
    best = best.unfilled or best
    carried = plan.rate if best.carries_rate else 0.0
    return next(
        (
            (rate, trial)
            for rate, trial in best.curve
            if rate > carried
            and not trial.carries(plan.attainment)
            and not best.carries_at(rate, trial, plan.attainment)
        ),
        None,
    )


def _tight_memory(appraised: Appraised, *reserves: float) -> str | None:
    """The first kind of memory that limits the layout: too small, and sessions lost their KV."""
    if not appraised.simulated["lost_sessions"]:
        return None
    return next((name for name, reserve in zip(_MEMORIES, reserves, strict=False) if reserve < _TIGHT), None)


def _tied(plan: GoodputPlan) -> str:
    others = plan.tied
    names = " and ".join(map(str, others)) if len(others) < 3 else f"{len(others)} other layouts"
    return f"{names} may carry as much, because simulations do not tell them apart from it."


def _higher_below(plan: GoodputPlan) -> list[str]:
    """Why the first layout is the first one, although another one is shown with a higher goodput; else nothing."""
    best, *others = (each.goodput for each in plan.layouts)
    if plan.has_fewest_gpus or best is None:
        return []
    higher = [each for each in others if each is not None and each.mean > best.mean]
    shown = f"A layout below {plan.layouts[0].layout} is shown with a higher rate"
    if any(each.seeds < best.seeds for each in higher):
        return [f"{shown}, but of fewer seeds. With the seeds that all of them have, it carries no more."]
    if higher and plan.scale > 1 and not plan.carries:
        return [
            f"{shown}. Such rates come from single short simulations, in steps of 10 %, so they do not order layouts. "
            "Long simulations of the part do."
        ]
    return []


def _next(step: NextStep) -> str:
    gpus = gpus_text(step.more_gpus)
    gain = step.gain
    between = "" if gain.low is None or gain.high is None else f" ({_gain(gain.low)} to {_gain(gain.high)})"
    if gain.mean <= 0:
        shown = f"{_gain(gain.mean)} sessions/s{between}" if between else f"less than it resolves ({PRECISION - 1:.0%})"
        return (
            f"The next {gpus} would buy nothing that the search shows: {shown}, with the best layout found, "
            f"{step.best.layout}."
        )
    unsure = ", which may be chance" if gain.low is not None and gain.low <= 0 else ""
    return f"The next {gpus} would buy {_gain(gain.mean)} sessions/s{between}{unsure}, with {step.best.layout}."


def _varied(varied: Varied, attainment: float) -> str:
    missed = "" if varied.carries else ", not carried"
    if not varied.carries and varied.attainment.mean >= attainment:
        missed += f", because {1 - varied.in_time:.1%} of the sessions end too late"
    return f"{varied.variation.name} {_share(varied.attainment)}{missed}"


def _share(figure: Figure) -> str:
    if figure.low is None or figure.high is None:
        return f"{figure.mean:.1%}"
    return f"{figure.mean:.1%} ({figure.low:.1%} to {figure.high:.1%})"


def _rate(figure: Figure) -> str:
    mean, low, high = (format_number(value) for value in (figure.mean, figure.low, figure.high))
    return mean if figure.low is None else f"{mean} ({low} to {high}, {figure.seeds} seeds)"


def rate_text(rate: float) -> str:
    """A rate that a user gave, or that was made round."""
    return format_number(rate, 6)


def _gain(sessions_per_s: float) -> str:
    return format_number(sessions_per_s, 2, "+")


def _over(target_s: float, seconds: float | None) -> float | None:
    return target_s / seconds if seconds else None
