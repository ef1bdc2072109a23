"""Pools policies for a process of their own; the child imports them from here."""

import os
import signal
from collections.abc import Sequence
from typing import ClassVar

from ampd.errors import UserError
from ampd.policies.base import PoolsSituation, RoleChange
from ampd.policies.registry import Policy
from ampd.types import Role


class TellsItsProcess(Policy):
    """Names the process that asks it as the reason, and its niceness as the label."""

    is_slow: ClassVar[bool] = True

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        view = situation.workers[0]
        return [RoleChange(view.worker_id, Role.PREFILL, str(os.getpid()), str(os.nice(0)))]


class Dies(Policy):
    """Takes its process down."""

    is_slow: ClassVar[bool] = True

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:  # noqa: ARG002
        os._exit(1)


class Hangs(Policy):
    """Never answers."""

    is_slow: ClassVar[bool] = True

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:  # noqa: ARG002
        os.kill(os.getpid(), signal.SIGSTOP)
        return ()


class LacksTimes(Policy):
    """Meets an error of the user."""

    is_slow: ClassVar[bool] = True

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:  # noqa: ARG002
        raise UserError("no times for TP 3")
