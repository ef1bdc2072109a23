"""Further studies, on four of the paper's settings: ours without a term, overload, bursts, wrong times, old views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from benchmarks import markdown_table
from benchmarks.geometric import geometric_mean
from benchmarks.policies.campaign import Job, Ledger, Task, in_parallel_kept, search_all
from benchmarks.policies.contest import CRITERIA, USUAL, Condition, Contestant
from benchmarks.policies.contestants import ABLATION, OURS, RIVALS
from benchmarks.policies.plots import relative
from benchmarks.policies.prepared import Prepared
from benchmarks.policies.report import TITLES, goodput_text, ratio_text
from benchmarks.policies.settings import Setting
from benchmarks.policies.standings import Standings

PLACES = (
    ("qwen3-32b", "toolbench"),
    ("llama-3.1-70b", "gaia"),
    ("mixtral-8x7b", "hotpotqa"),
    ("qwen3-32b", "dureader"),
)
"""Model and trace of the settings, one for each trace."""
OVERLOADS = (1.0, 1.5, 2.0, 3.0)
_CHOSEN_BY = "sustained_rounds"
_FLOOR = 0.01

CONDITIONS = {
    "bursts": (Condition("conversation", arrivals="conversation"), Condition("coding", arrivals="coding")),
    "wrong-model": tuple(
        Condition(f"{name}{suffix}", belief=f"{kept}{belief}")
        for name, belief in (
            ("times x0.7", "0.7"),
            ("times x1.3", "1.3"),
            ("prefill, decode and transfer each x0.7..1.3", "random"),
        )
        for suffix, kept in (("", ""), (", not corrected", "kept-"))
    ),
    "stale": (Condition("state 200 ms old", state_delay_s=0.2),),
    "replicas": (Condition("3 coordinators, state 200 ms old", state_delay_s=0.2, coordinators=3),),
}
STUDIES = ("ablation", "overload", *CONDITIONS)


@dataclass(frozen=True)
class Bench:
    """What a study needs to run."""

    ledger: Ledger
    settings: Sequence[Setting]
    seeds: int
    prepared: Prepared
    jobs: int

    def search(self, contestants: Sequence[Contestant], conditions: Sequence[Condition], seeds: int) -> None:
        search_all(
            self.ledger,
            [
                (setting, contestant, condition)
                for condition in conditions
                for setting in self.settings
                for contestant in contestants
            ],
            seeds,
            self.prepared,
            self.jobs,
        )

    def standings(self, contestants: Sequence[Contestant], condition: Condition = USUAL) -> Standings:
        return Standings(self.ledger, self.settings, contestants, self.seeds, condition)


def study(name: str, bench: Bench, rivals: Sequence[Contestant] = RIVALS) -> dict[str, str]:
    """Run a study; its tables in Markdown, by title. The two best `rivals` take part, but for the ablation."""
    if name == "ablation":
        return _ablation(bench)
    field = [OURS, *_best_two(bench, rivals)]
    if name == "overload":
        return {name: _overload(bench, field)}
    return _conditions(name, bench, field)


def _best_two(bench: Bench, rivals: Sequence[Contestant]) -> list[Contestant]:
    """By their first seed, relative to ours."""
    bench.search([OURS, *rivals], [USUAL], 1)
    standings = Standings(bench.ledger, bench.settings, [OURS, *rivals], 1)
    return sorted(rivals, key=lambda rival: -(relative(standings, bench.settings, rival, _CHOSEN_BY) or 0.0))[:2]


# -- ours without one term


def _ablation(bench: Bench) -> dict[str, str]:
    bench.search([OURS, *ABLATION], [USUAL], bench.seeds)
    standings = bench.standings([OURS, *ABLATION])
    rows = []
    for our in (OURS, *ABLATION):
        shares = [relative(standings, bench.settings, our, criterion) for criterion in CRITERIA]
        rows.append([our.label, *("-" if share is None else f"{share:.2f}" for share in shares)])
    return {
        "ablation": markdown_table.table(
            ["contestant", *(f"{title}, share of ours" for title in TITLES.values())], rows
        ),
        "ablation by setting": _by_setting(bench, standings, partial(_share_of_ours, standings)),
    }


def _by_setting(
    bench: Bench,
    standings: Standings,
    ratio: Callable[[Setting, Contestant], tuple[float, float, float] | None],
) -> str:
    rows = []
    for contestant in standings.contestants:
        goodputs = (goodput_text(standings.goodput(setting, contestant, _CHOSEN_BY)) for setting in bench.settings)
        ratios = (ratio_text(ratio(setting, contestant)) for setting in bench.settings)
        rows.append(
            [contestant.label, *(f"{goodput}; {share}" for goodput, share in zip(goodputs, ratios, strict=True))]
        )
    heads = [f"{TITLES[_CHOSEN_BY]} (sessions/s; share of ours)", *(setting.name for setting in bench.settings)]
    return markdown_table.table(heads, rows)


# -- more than can be carried


def _overload(bench: Bench, field: Sequence[Contestant]) -> str:
    bench.search([OURS], [USUAL], bench.seeds)
    mine = bench.standings([OURS])
    rows = []
    plans: list[tuple[Setting, tuple[float, ...]]] = []
    for setting in bench.settings:
        carried = mine.goodput(setting, OURS, _CHOSEN_BY)
        rate = carried.mean if carried and carried.mean else bench.prepared.reference_rate(setting)
        plans.append((setting, tuple(float(f"{load * rate:.4g}") for load in OVERLOADS)))
    tasks = {
        (setting, each): [Task(setting, each, seed, USUAL, rates) for seed in range(bench.seeds)]
        for setting, rates in plans
        for each in field
    }
    jobs = [Job(task, None, bench.prepared) for group in tasks.values() for task in group]
    in_parallel_kept(bench.ledger, jobs, bench.jobs, "overload")
    for setting, rates in plans:
        for each in field:
            found = [result for task in tasks[setting, each] if (result := bench.ledger.found(task))]
            for load, rate in zip(OVERLOADS, rates, strict=True):
                points = [result.points[rate] for result in found]
                rows.append(
                    [
                        setting.name,
                        each.label,
                        f"{load:g} x ({rate:.3g}/s)",
                        f"{fmean(point.rounds for point in points):.1%}",
                        f"{fmean(point.sessions for point in points):.1%}",
                        f"{fmean(point.in_time for point in points):.1%}",
                        f"{fmean(point.completed for point in points):.1f}",
                        f"{fmean(point.attained for point in points):.1f}",
                    ]
                )
    head = ["setting", "contestant", "load", "rounds attained", "sessions attained", "sessions in time"]
    return markdown_table.table([*head, "rounds completed /s", "of these on target /s"], rows)


# -- unusual conditions


def _conditions(name: str, bench: Bench, field: Sequence[Contestant]) -> dict[str, str]:
    conditions = CONDITIONS[name]
    bench.search(field, [USUAL, *conditions], bench.seeds)
    usual = bench.standings(field)
    rows = []
    for condition in conditions:
        standings = bench.standings(field, condition)
        for each in field:
            shares = [_retained(bench, usual, standings, each, criterion) for criterion in CRITERIA]
            versus = relative(standings, bench.settings, each, _CHOSEN_BY)
            rows.append(
                [condition.name, each.label, *(f"{value:.2f}" if value else "-" for value in (*shares, versus))]
            )
    heads = ["condition", "contestant", *(f"{title}, share of the usual" for title in TITLES.values())]
    found = {name: markdown_table.table([*heads, f"{TITLES[_CHOSEN_BY]}, share of ours"], rows)}
    for condition in conditions:
        standings = bench.standings(field, condition)
        found[f"{name}, {condition.name}"] = _by_setting(bench, standings, partial(_share_of_ours, standings))
    return found


def _share_of_ours(standings: Standings, setting: Setting, contestant: Contestant) -> tuple[float, float, float] | None:
    return standings.ratio(setting, contestant, OURS, _CHOSEN_BY)


def _retained(bench: Bench, usual: Standings, now: Standings, contestant: Contestant, criterion: str) -> float | None:
    shares = []
    for setting in bench.settings:
        before, after = (standings.goodput(setting, contestant, criterion) for standings in (usual, now))
        if before and after and before.mean > 0:
            shares.append(max(after.mean / before.mean, _FLOOR))
    return geometric_mean(shares) if shares else None
