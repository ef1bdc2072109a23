"""`python -m router` with a pools policy `from-file(path=...)`, which wants what a file says: to change roles in tests.

The file holds a JSON object, worker id -> [role, lane]; the reason is `script`.
"""

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.base import RoleChange
from ampd.policies.registry import Policy, register
from ampd.types import Role, Slo, WorkerView
from router.__main__ import main


@register("pools", "from-file")
class FromFile(Policy):
    """What the file says."""

    path: str = Field("", description="The file.")

    def change(
        self,
        workers: Sequence[WorkerView],
        slo: Slo,  # noqa: ARG002
        model: PerformanceModel,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
        changed_s: float,  # noqa: ARG002
        rng: random.Random,  # noqa: ARG002
    ) -> Sequence[RoleChange]:
        """The roles of the workers that the file names."""
        wanted = json.loads(Path(self.path).read_text())
        return [
            RoleChange(view.worker_id, Role(role), "script", lane)
            for view in workers
            for role, lane in [wanted.get(view.worker_id, [view.role, view.lane])]
        ]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
