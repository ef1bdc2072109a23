"""Terms that the binding `predictive` could have, and the attainment with each: the same sessions, simulated.

python -m benchmarks.binding_terms coding-agents qwen3-32b h20 1xTP2 1xTP4,1xTP2 --ttft 8 --itl 0.05 --rate 0.12 \
    --seconds 1500 --seeds 12

`evictions` adds the time in which the sessions that lose their KV compute it again, as a share of the TTFT target.
`growth` does so for the time when the sessions that are there have grown. `gathered` takes the most loaded of the
workers that stay within a share of both targets and of the memory, so that batches are on few workers.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import fmean
from typing import Literal

from ampd.policies.base import BindingPolicy, BindingSituation
from ampd.policies.binding.predictive import PredictiveBinding, roomy
from ampd.policies.estimates import index_of_least, session_memory
from ampd.policies.registry import Policy
from ampd.types import WorkerView
from benchmarks.policies.contestants import OURS_STATIC
from benchmarks.policies.one_setting import add_setting, setting_of
from benchmarks.policies.settings import Setting
from planner.simulator.options import SimulationOptions
from planner.simulator.simulate import simulate

_PREDICTIVE = PredictiveBinding.model_validate({})
_OUT = 100.0
"""More than any load: workers beyond their share come last."""


class WithTerm(Policy):
    """The binding `predictive` with a further term."""

    term: Literal["evictions", "growth", "gathered"]
    weight: float
    """Of the term; for `gathered` the share of a target or of the memory that a worker may use."""

    def bind(self, situation: BindingSituation) -> str:
        workers = roomy(situation)
        return workers[index_of_least([self._load(situation, each) for each in workers], situation.rng)].worker_id

    def _load(self, situation: BindingSituation, worker: WorkerView) -> float:
        load = _PREDICTIVE.load(situation, worker)
        if self.term == "gathered":
            return -load if max(_PREDICTIVE.shares(situation, worker)) <= self.weight else load + _OUT
        return load + self.weight * self._lost_s(situation, worker) / situation.task.slo.ttft_s

    def _lost_s(self, situation: BindingSituation, worker: WorkerView) -> float:
        """Time in which sessions compute the KV again that does not fit with this one."""
        used_tokens, capacity_tokens = session_memory(worker)
        sessions = len(worker.held_tokens) + 1
        tokens = used_tokens + situation.task.context_tokens
        mean_tokens = tokens / sessions
        if self.term == "growth":
            tokens *= 2  # a session that is somewhere in its course has about as much before it as behind it
        lost_tokens = tokens - capacity_tokens if capacity_tokens else 0
        if lost_tokens <= 0:
            return 0.0
        return lost_tokens / mean_tokens * situation.model.prefill_s(0, round(mean_tokens), worker.parallelism)


BINDINGS: dict[str, BindingPolicy] = {
    "predictive": _PREDICTIVE,
    "evictions x 1": WithTerm(term="evictions", weight=1.0),
    "evictions x 0.1": WithTerm(term="evictions", weight=0.1),
    "growth x 1": WithTerm(term="growth", weight=1.0),
    "growth x 0.1": WithTerm(term="growth", weight=0.1),
    "gathered up to 0.7": WithTerm(term="gathered", weight=0.7),
    "gathered up to 0.5": WithTerm(term="gathered", weight=0.5),
}


def row(setting: Setting, rate: float, seeds: int, name: str) -> str:
    """The means of the seeds as a row of the table."""
    policies = replace(OURS_STATIC.policies(), binding=BINDINGS[name])
    done = [
        simulate(
            setting.sessions(rate, seed),
            setting.cluster(),
            setting.performance_model(),
            policies,
            setting.slo,
            # Sessions that leave a full memory would blur the differences.
            SimulationOptions(seed=seed, moves="never"),
        )
        for seed in range(1, seeds + 1)
    ]
    reached = [each.attainment(setting.slo) for each in done]
    rounds, sessions = fmean(each.rounds for each in reached), fmean(each.sessions for each in reached)
    return f"| {name} | {rounds:.1%} | {sessions:.1%} | {fmean(each.lost_sessions for each in done):.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_setting(parser)
    given = parser.parse_args()
    print("| binding | rounds | sessions | sessions that lost their KV |")
    print("| --- | --- | --- | --- |")
    for name in BINDINGS:
        print(row(setting_of(given), given.rate, given.seeds, name), flush=True)


if __name__ == "__main__":
    main()
