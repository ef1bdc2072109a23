"""A process of its own for a pools policy that takes long, so that rounds do not wait for it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from math import inf
from multiprocessing import get_context

from ampd.child_process import end_with_parent
from ampd.errors import UserError
from ampd.policies.base import PoolsPolicy, PoolsSituation, RoleChange
from ampd.serving.roles import rest_s
from ampd.types import Role, WorkerView

log = logging.getLogger(__name__)

_NICE = 19
"""Any other process goes first."""

_LONGEST_S = 600.0
"""An answer that takes longer never comes. The process is ended, because no other question would be answered."""

_OLDEST_S = 60.0
"""An answer that is older is about a load that may be over. The policy is asked again instead."""


class PolicyProcess:
    """Asks a pools policy in one child process, one question at a time. The first question starts the process.

    Attributes:
        spent_s: seconds from questions to answers, so far.
        lasted_s: the same for the latest answer.
        question: the latest one; None: there was none.
    """

    def __init__(self, policy: PoolsPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._pool: ProcessPoolExecutor | None = None
        self._asked: asyncio.Task[Sequence[RoleChange]] | None = None
        self._next_s = -inf
        self.spent_s = 0.0
        self.lasted_s = 0.0
        self.question: PoolsSituation | None = None

    def is_due(self) -> bool:
        """Whether the next question may be asked."""
        return self._asked is None and self._clock() >= self._next_s

    def ask(self, situation: PoolsSituation) -> None:
        """Ask a question; `answer` has the answer later."""
        self.question = situation
        self._asked = asyncio.create_task(self._change(situation, self._clock()))

    def answer(self) -> Sequence[RoleChange]:
        """The answer, once; nothing before it has come.

        Raises:
            UserError: the performance model lacks a worker's parallelism.
        """
        if self._asked is None or not self._asked.done():
            return ()
        asked, self._asked = self._asked, None
        return asked.result()

    def forget(self) -> None:
        """Drop a question and its answer: they are about a time that is over."""
        if self._asked is not None:
            self._asked.cancel()
            self._asked = None

    async def _change(self, situation: PoolsSituation, began_s: float) -> Sequence[RoleChange]:
        try:
            return await self._computed(situation)
        finally:
            self.lasted_s = self._clock() - began_s
            self.spent_s += self.lasted_s
            self._next_s = began_s + self.lasted_s + rest_s(self._policy, self.lasted_s)

    async def _computed(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        if self._pool is None:
            context = get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_prepare, initargs=(os.getpid(),))
        try:
            async with asyncio.timeout(_LONGEST_S):
                answer = await asyncio.get_running_loop().run_in_executor(self._pool, _answer, self._policy, situation)
        except (BrokenProcessPool, TimeoutError) as error:
            what = "died" if isinstance(error, BrokenProcessPool) else f"was ended after {_LONGEST_S:g} s"
            log.warning("the process of the pools policy %s: roles stay as they are until the next question", what)
            self._end_process()
            return ()
        if isinstance(answer, str):
            raise UserError(answer)
        return answer

    def stop(self) -> None:
        """End the process, even in the middle of an answer."""
        self.forget()
        self._end_process()

    def _end_process(self) -> None:
        pool, self._pool = self._pool, None
        if pool is None:
            return
        children = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.kill()


def why_outdated(question: PoolsSituation, workers: Sequence[WorkerView], now_s: float) -> str:
    """Why an answer no longer counts, in words; "": it does.

    Args:
        workers: as they would be asked about now.
    """
    if now_s - question.now_s > _OLDEST_S:
        return f"it took {now_s - question.now_s:.0f} s"
    return "" if _roles(question.workers) == _roles(workers) else "the workers or their roles have changed meanwhile"


def _roles(workers: Sequence[WorkerView]) -> dict[str, tuple[Role, str]]:
    return {view.worker_id: (view.role, view.label) for view in workers}


def _prepare(parent: int) -> None:
    """In the child: let others go first, and end with the parent, however that ends.

    A signal to the whole process group is the parent's to handle, because the parent ends the child.
    """
    os.nice(_NICE)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _answer(policy: PoolsPolicy, situation: PoolsSituation) -> Sequence[RoleChange] | str:
    """In the child. An error of a user travels as its text, because not every exception can be unpickled."""
    try:
        return policy.change(situation)
    except UserError as error:
        return str(error)
