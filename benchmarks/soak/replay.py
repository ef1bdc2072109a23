"""Agents that run the sessions of a trace, one after the other, until the soak ends."""

from __future__ import annotations

import asyncio
import random
from itertools import count

from benchmarks.faults.learnt import LEARNT, LearntTexts
from benchmarks.faults.load import Agent, Client, RunningAgents
from benchmarks.faults.tokens import Expected
from workloads.trace import Session, load_trace

TRACE = "tau-bench-airline"
SHARE_OF_TOKENS = 0.25
"""Of the trace's tokens, so that more rounds come into the time."""
LONGEST_GAP_S = 0.25
"""Between two rounds. The trace has none; here they make the moments of the agents differ."""


class ReplayedLoad(RunningAgents):
    """`stop` lets each agent end its session with its next round, and so does `rest` until `go_on`.

    Answers that must be learnt are: each session runs as another tenant before.
    """

    def __init__(self, client: Client, expected: Expected, agents: int, seed: int) -> None:
        super().__init__()
        self._client = client
        self._expected = expected
        self._learnt = expected if isinstance(expected, LearntTexts) else None
        self._sessions = load_trace(TRACE)
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._replaying = 0
        self._has_rest = asyncio.Event()
        self._start(self._run(number, seed) for number in range(agents))

    async def _run(self, number: int, seed: int) -> None:
        rng = random.Random(f"{seed} {number}")
        for session in count():
            name, replayed = f"soak-{number}-{session}", rng.choice(self._sessions)
            for session_id in (f"{name}{LEARNT}", name) if self._learnt else (name,):
                await self._may_begin.wait()
                if self._is_over.is_set():
                    return
                agent = Agent(self._client, self._expected, session_id, random.Random(f"{seed} {name}"))
                self._replaying += 1
                try:
                    await self._replay(agent, replayed, rng)
                finally:
                    self._replaying -= 1
                    if not self._replaying:
                        self._has_rest.set()

    async def rest(self) -> None:
        """Let all agents end their sessions, and wait until they have."""
        self._may_begin.clear()
        while self._replaying:
            self._has_rest.clear()
            await self._has_rest.wait()

    def go_on(self) -> None:
        """Let the agents begin sessions again."""
        self._may_begin.set()

    async def stop(self) -> None:
        self.go_on()
        await super().stop()

    async def _replay(self, agent: Agent, session: Session, rng: random.Random) -> None:
        for item in session.rounds:
            is_last = item is session.rounds[-1]
            is_final = is_last or self._is_over.is_set() or not self._may_begin.is_set()
            tokens = _share(item.incr_tokens), _share(item.output_tokens)
            if self._learnt and agent.session_id.endswith(LEARNT):
                await self._learnt.learn(agent, *tokens, is_final=is_final)
            else:
                await agent.round(*tokens, is_final=is_final)
            if is_final:
                return
            await asyncio.sleep(rng.uniform(0.0, LONGEST_GAP_S))


def _share(tokens: int) -> int:
    return max(1, round(tokens * SHARE_OF_TOKENS))
