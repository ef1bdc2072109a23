"""Agents that run the sessions of a trace, one after the other, until the soak ends."""

from __future__ import annotations

import asyncio
import random
from itertools import count

from benchmarks.faults.load import Agent, Client, RunningAgents
from benchmarks.faults.tokens import ExpectedTokens
from workloads.trace import Session, load_trace

TRACE = "tau-bench-airline"
SHARE_OF_TOKENS = 0.25
"""Of the trace's tokens, so that more rounds come into the time."""
LONGEST_GAP_S = 0.25
"""Between two rounds. The trace has none; here they make the moments of the agents differ."""


class ReplayedLoad(RunningAgents):
    """`stop` lets each agent end its session with its next round."""

    def __init__(self, client: Client, expected: ExpectedTokens, agents: int, seed: int) -> None:
        super().__init__()
        self._client = client
        self._expected = expected
        self._sessions = load_trace(TRACE)
        self._start(self._run(number, seed) for number in range(agents))

    async def _run(self, number: int, seed: int) -> None:
        rng = random.Random(f"{seed} {number}")
        for session in count():
            if self._is_over.is_set():
                return
            agent = Agent(self._client, self._expected, f"soak-{number}-{session}", rng)
            await self._replay(agent, rng.choice(self._sessions), rng)

    async def _replay(self, agent: Agent, session: Session, rng: random.Random) -> None:
        for item in session.rounds:
            is_final = item is session.rounds[-1] or self._is_over.is_set()
            await agent.round(_share(item.incr_tokens), _share(item.output_tokens), is_final=is_final)
            if is_final:
                return
            await asyncio.sleep(rng.uniform(0.0, LONGEST_GAP_S))


def _share(tokens: int) -> int:
    return max(1, round(tokens * SHARE_OF_TOKENS))
