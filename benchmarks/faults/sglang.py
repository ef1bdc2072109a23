"""Real SGLang engines under the harness: fewer faults and moments, because each start of an engine takes seconds.

The expected text of a round is what the same graph answered to the same prompt before the fault, at temperature 0.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from benchmarks.faults.cell import CellRunner
from benchmarks.faults.cluster import LiveGraph, Member
from benchmarks.faults.fault import Action, Fault, Scene
from benchmarks.faults.kv_faults import KV_REFUSED
from benchmarks.faults.load import Agent, Client, Ending
from benchmarks.faults.moments import LOCAL, VICTIM_ROUNDS, Moment, Stage
from benchmarks.faults.tokens import random_prompt

MOMENTS = (Moment.PREFILLING, Moment.DECODING, Moment.TOOL_GAP)
WORKER_FLAGS = ("--device", "cpu", "--dtype", "float32", "--max-total-tokens", "16384", "--kv-store-gib", "0.1")
STOPPED_S = 5.0
_GROUP = "SGLang"


class ServedTokens:
    """The texts that an undisturbed graph gave.

    The context of a next round holds other tokens than those that came out: clients get texts, not tokens.
    """

    def __init__(self) -> None:
        self._texts: dict[tuple[int, ...], str] = {}

    def output(self, prompt: Sequence[int], count: int) -> list[int]:
        """Tokens that stand for the output in the next prompt."""
        seed = sha256(repr((list(prompt), count)).encode()).hexdigest()
        return random_prompt(random.Random(seed), count)

    def text(self, tokens: Sequence[int]) -> str:
        return self._texts.get(tuple(tokens), "")

    async def learn(self, client: Client, name: str) -> None:
        """Run the rounds that a victim will run, in a session of its own.

        Raises:
            RuntimeError: a round did not complete.
        """
        agent = Agent(client, self, f"{name}-reference", Stage.rng(name))
        for number, (increment_tokens, output_tokens) in enumerate(VICTIM_ROUNDS):
            options, is_final = LOCAL if number == 0 else {}, number == len(VICTIM_ROUNDS) - 1
            result = await agent.round(increment_tokens, output_tokens, options=options, is_final=is_final)
            if result.ending not in (Ending.COMPLETED, Ending.WRONG):  # no text is known yet
                raise RuntimeError(f"{agent.session_id}: {result.detail}")
            self._texts[tuple(self.output(agent.prompt, output_tokens))] = result.text
        client.results.clear()


class SglangRunner(CellRunner):
    """Cells without other sessions: their texts would have to be learnt, too."""

    def __init__(self, graph: LiveGraph) -> None:
        self._served = ServedTokens()
        super().__init__(graph, self._served, agents=0)

    async def prepare(self, client: Client, name: str) -> None:
        await self._served.learn(client, name)


def _engine_pid(member: Member) -> int:
    """SGLang's scheduler: the first process that the worker started and that is busy with the model."""
    folder = Path(f"/proc/{member.process.pid}/task")
    children = [int(pid) for task in folder.iterdir() for pid in (task / "children").read_text().split()]
    return next(pid for pid in sorted(children) if b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes())


def _signals_engine(number: signal.Signals) -> Action:
    async def act(scene: Scene) -> None:
        os.kill(_engine_pid(scene.worker), number)

    return act


def _kills_container(kind: str) -> Action:
    """The worker and its engine end together, as in a container."""

    async def act(scene: Scene) -> None:
        os.killpg(scene.processes[kind].process.pid, signal.SIGKILL)
        await asyncio.sleep(0)

    return act


SGLANG_FAULTS = [
    Fault("kill-engine", _GROUP, "SIGKILL of SGLang's scheduler of the worker", _signals_engine(signal.SIGKILL)),
    Fault(
        "stop-engine",
        _GROUP,
        f"SIGSTOP of SGLang's scheduler of the worker, SIGCONT after {STOPPED_S:g} s",
        _signals_engine(signal.SIGSTOP),
        _signals_engine(signal.SIGCONT),
        holds_s=STOPPED_S,
    ),
    Fault("kill-decode", _GROUP, "SIGKILL of the decode worker and its engine", _kills_container("decode")),
    Fault("kill-prefill", _GROUP, "SIGKILL of the prefill worker and its engine", _kills_container("prefill")),
    KV_REFUSED,
]
