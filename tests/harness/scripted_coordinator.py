"""`python -m router` with policies for tests: pools `from-file(path=...)`, as a file says, and binding `dice`.

The file holds a JSON object, worker id -> [role, label]; the reason is `script`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from ampd.child_process import exit_now
from ampd.policies.base import BindingSituation, PoolsSituation, RoleChange
from ampd.policies.registry import Policy, register
from ampd.types import Role
from router.__main__ import main


@register("pools", "from-file")
class FromFile(Policy):
    """What the file says."""

    path: str = Field("", description="The file.")

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        """The roles of the workers that the file names."""
        wanted = json.loads(Path(self.path).read_text())
        return [
            RoleChange(view.worker_id, Role(role), "script", label)
            for view in situation.workers
            for role, label in [wanted.get(view.worker_id, [view.role, view.label])]
        ]


@register("binding", "dice")
class Dice(Policy):
    """Any worker."""

    def bind(self, situation: BindingSituation) -> str:
        """One of the workers at random."""
        return situation.rng.choice(situation.decode).worker_id


if __name__ == "__main__":
    exit_now(main())
