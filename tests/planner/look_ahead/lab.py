"""The question to a pools policy that looks ahead."""

import random
from collections.abc import Sequence

from ampd.perf.presets import analytic_model
from ampd.policies.base import OtherPolicies, PoolsSituation
from ampd.policies.registry import create
from ampd.recent_load import Load
from ampd.types import Parallelism, Role, Slo, WorkerView

MODEL = analytic_model("llama-3.1-8b", "h20")
SLO = Slo(1.0, 0.02)
OTHERS = OtherPolicies(routing=create("routing", "always-remote"), ordering=create("ordering", "fcfs"))


def workers_of(*roles: Role) -> list[WorkerView]:
    return [WorkerView(f"w{number}", role, Parallelism(1)) for number, role in enumerate(roles)]


def question(workers: Sequence[WorkerView], load: Load, slo: Slo = SLO, now_s: float = 10.0) -> PoolsSituation:
    return PoolsSituation(
        model=MODEL,
        now_s=now_s,
        workers=workers,
        slo=slo,
        changed_s=float("-inf"),
        rng=random.Random(1),
        load=load,
        others=OTHERS,
    )
