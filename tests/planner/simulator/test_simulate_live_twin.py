"""The simulator against the live workers: the same rounds through worker shells and modelled engines, in virtual time.

The live side is what a graph runs (`workers.round_service`, queues, engines, KV exchange) without Dynamo in between; a
loop whose clock jumps makes it exact, so that nothing here depends on the machine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ampd.perf.corrections import CorrectedModel
from ampd.perf.piecewise import PiecewiseModel
from ampd.policies.base import SlicingPolicy
from ampd.policies.registry import create_named
from ampd.policies.slicing.slack import SlackSlicing
from ampd.serving.pass_sizes import PassSizes
from ampd.types import Parallelism, Role
from ampd.wire import GenerateRequest, PrefillRequest
from planner.simulator.options import SimulationOptions
from planner.simulator.outcome import SimulatedRound
from tests.harness.driver import message
from tests.memory_store import MemoryStore
from tests.virtual_time import run_virtually
from tests.workers.engines.modelled_lab import LocalPeers
from tests.workers.rounds_lab import chunks_of
from workers.engines.modelled import ModelledEngine
from workers.engines.modelled_tokens import ModelFacts
from workers.parts import WorkerParts
from workers.round_service import RoundService
from workers.settings import WorkerSettings
from workloads.trace import Round, Session, kept_tokens

from .lab import APART, MODEL, SLO, RouteBy, run, single

CAPACITY_TOKENS = 100_000
FACTS = ModelFacts(
    printable=((5, "word"), (6, "other")), eos_token_ids=(), max_context_tokens=50_000, kv_bytes_per_token=1
)

# The simulated workers have no store: a read from the other worker ends on the device.
_FREE_RELOADS = {"host_link_bytes_per_s": 1e30}

WHOLE = create_named("slicing", "whole")


@dataclass
class Times:
    """When a round was sent, got its first token and ended."""

    sent_s: float
    first_s: float
    end_s: float


class LiveWorkers:
    """One prefill and one decode worker."""

    def __init__(self, ordering: str, slicing: SlicingPolicy, model: PiecewiseModel) -> None:
        times = PiecewiseModel(model.profile.model_copy(update=_FREE_RELOADS), backend=model.backend)
        clock = asyncio.get_running_loop().time
        self.peers = LocalPeers()
        self.rounds: dict[str, RoundService] = {}
        self.held: dict[str, Callable[[str, int], None]] = {}
        for name, role in (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE)):
            engine = self.peers.engines[name] = ModelledEngine(
                FACTS,
                times,
                Parallelism(),
                CAPACITY_TOKENS,
                CAPACITY_TOKENS,
            )
            engine.sizes = PassSizes(slicing, model, Parallelism(), engine.info.page_size_tokens)
            parts = WorkerParts(
                name,
                WorkerSettings(
                    role=role.value,
                    engine="modelled",
                    model=Path("m"),
                    session_ttl_s=1e9,
                    session_first_ttl_s=1e9,
                    kv_timeout_s=60.0,
                ),
                engine,
                MemoryStore(),
                CorrectedModel(model, Parallelism()),
                create_named("ordering", ordering),
                clock,
            )
            self.held[name] = parts.changes.held
            self.rounds[name] = parts.rounds

    async def play(self, sessions: Sequence[Session], remote: Sequence[int]) -> dict[tuple[str, int], Times]:
        for name, engine in self.peers.engines.items():
            await engine.start()
            engine.kv.connect(self.peers, self.held[name])
        times: dict[tuple[str, int], Times] = {}
        await asyncio.gather(*(self._session(session, remote, times) for session in sessions))
        for engine in self.peers.engines.values():
            await engine.stop()
        return times

    async def _session(self, session: Session, remote: Sequence[int], times: dict[tuple[str, int], Times]) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(session.arrival_s)
        context: list[int] = []
        for index, item in enumerate(session.rounds):
            await asyncio.sleep(item.tool_s)
            sent_s = loop.time()
            dice = random.Random(f"{session.session_id}/{index}")
            new = [dice.randrange(10, 400) for _ in range(item.incr_tokens)]
            prompt = context[: kept_tokens(item, len(context))] + new
            out, first_s = await self._round(session.session_id, prompt, item.output_tokens, index in remote)
            times[session.session_id, index] = Times(sent_s, first_s, loop.time())
            context = prompt + out

    async def _round(self, session: str, prompt: list[int], output: int, is_remote: bool) -> tuple[list[int], float]:
        """The output's tokens and when the first came: what a coordinator does."""
        loop, prefill, decode = asyncio.get_running_loop(), self.rounds["prefill-0"], self.rounds["decode-0"]
        held = await self.peers.engines["decode-0"].kv.held_tokens(session)
        hist = min(held, len(prompt) - 1)
        out: list[int] = []
        first_s = -1.0
        if is_remote:
            ask: Any = message(prompt, session=session, hist=hist, source="decode-0" if hist else None)
            ask["task"]["slo"] = {"ttft_s": SLO.ttft_s, "itl_s": SLO.itl_s}
            request: PrefillRequest = ask
            async for chunk in chunks_of(prefill.prefill, request):
                out += chunk["token_ids"]
            first_s = loop.time()
        ask = message(
            prompt + out,
            session=session,
            hist=hist,
            source="prefill-0" if is_remote else None,
            max_tokens=output - len(out),
        )
        ask["task"]["slo"] = {"ttft_s": SLO.ttft_s, "itl_s": SLO.itl_s}
        more: GenerateRequest = ask
        async for chunk in chunks_of(decode.generate, more):
            if not out:
                first_s = loop.time()
            out += chunk["token_ids"]
        return out, first_s


def _live(
    sessions: Sequence[Session],
    remote: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
    ordering: str,
    slicing: SlicingPolicy,
    model: PiecewiseModel,
) -> dict[tuple[str, int], Times]:
    async def main() -> dict[tuple[str, int], Times]:
        return await LiveWorkers(ordering, slicing, model).play(sessions, remote)

    return run_virtually(main(), monkeypatch, "workers.engines.modelled_request")


def _rounds(*rounds: tuple[int, int], keep: dict[int, int] | None = None) -> tuple[Round, ...]:
    return tuple(
        Round(
            incr_tokens=incr,
            output_tokens=output,
            tool_s=0.4 if index else 0.0,
            keep_tokens=(keep or {}).get(index),
        )
        for index, (incr, output) in enumerate(rounds)
    )


def _compare(
    sessions: Sequence[Session],
    remote: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
    tolerance_s: float,
    ordering: str = "fcfs",
    slicing: SlicingPolicy = WHOLE,
    model: PiecewiseModel = MODEL,
) -> list[SimulatedRound]:
    live = _live(sessions, remote, monkeypatch, ordering, slicing, model)
    routed = replace(
        RouteBy(lambda index: index in remote).policies(),
        ordering=create_named("ordering", ordering),
        slicing=slicing,
    )
    how = SimulationOptions(hand_over_pass=False)
    done = run(sessions, single(1, CAPACITY_TOKENS), routed, how, model).rounds
    assert len(done) == len(live)
    for each in done:
        theirs = live[each.session_id, each.index]
        assert each.error is None
        assert each.ttft_s is not None
        assert each.e2e_s is not None
        assert each.sent_s == pytest.approx(theirs.sent_s, abs=tolerance_s)
        assert each.ttft_s == pytest.approx(theirs.first_s - theirs.sent_s, abs=tolerance_s)
        assert each.e2e_s == pytest.approx(theirs.end_s - theirs.sent_s, abs=tolerance_s)
    return done


@pytest.mark.parametrize("remote", [(), (0,), (1, 2), (0, 2), (0, 1, 2, 3)], ids=str)
def test_rounds_one_after_the_other_take_the_same_time(
    remote: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = _rounds((1203, 30), (317, 2), (95, 64), (2001, 17), keep={3: 700})
    _compare([Session(session_id="s", arrival_s=0.0, rounds=rounds)], remote, monkeypatch, 1e-5)


def test_rounds_that_an_ordering_holds_back_for_company_take_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = _rounds((1203, 30), (217, 2), (95, 64), (256, 17))
    sessions = [Session(session_id="s", arrival_s=0.0, rounds=rounds)]
    _compare(sessions, (0, 1, 3), monkeypatch, 1e-5, "laps(max_wait_s=0.1)")


@pytest.mark.parametrize(
    "ordering", ["fcfs", "ampd", "continuum", "edf", "hrrn", "jct", "shortest-prefill-first", "laps(boundary_tokens=1)"]
)
def test_rounds_that_meet_at_a_prefill_worker_take_the_same_time(
    ordering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(3)
    sessions = [
        Session(
            session_id=f"s{number}",
            arrival_s=0.05 * number + dice.random() * 0.1,
            rounds=_rounds(*((dice.randrange(100, 2000), dice.randrange(2, 80)) for _ in range(3))),
        )
        for number in range(8)
    ]
    _compare(sessions, (0, 1, 2), monkeypatch, 1e-5, ordering)


def _that_meet(seed: int) -> list[Session]:
    """No two histories are read at once: reads share a link in the simulator, and have one each live."""
    dice = random.Random(seed)
    return [
        Session(
            session_id=f"s{number}",
            arrival_s=0.1 * number + dice.random() * 0.1,
            rounds=_rounds(*((dice.randrange(100, 4000), dice.randrange(2, 120)) for _ in range(3))),
        )
        for number in range(8)
    ]


OURS = "on-time(late_share=0)"


@pytest.fixture
def equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """These workers do not know which sessions have missed a target."""
    monkeypatch.setattr("ampd.policies.estimates.MISSED_WEIGHT", 1.0)


@pytest.mark.usefixtures("equal_weights")
@pytest.mark.parametrize("model", [MODEL, APART], ids=["mixed", "apart"])
@pytest.mark.parametrize("remote", [(), (0,), (1, 2), (0, 2), (0, 1, 2, 3)], ids=str)
def test_our_passes_of_rounds_one_after_the_other_take_the_same_time(
    remote: tuple[int, ...], model: PiecewiseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = _rounds((3203, 30), (317, 2), (95, 64), (6001, 17), keep={3: 700})
    sessions = [Session(session_id="s", arrival_s=0.0, rounds=rounds)]
    _compare(sessions, remote, monkeypatch, 1e-5, OURS, SlackSlicing(), model)


@pytest.mark.usefixtures("equal_weights")
@pytest.mark.parametrize("model", [MODEL, APART], ids=["mixed", "apart"])
@pytest.mark.parametrize("remote", [(), (0,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_our_passes_of_rounds_that_meet_take_the_same_time(
    seed: int, remote: tuple[int, ...], model: PiecewiseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compare(_that_meet(seed), remote, monkeypatch, 1e-5, OURS, SlackSlicing(), model)
