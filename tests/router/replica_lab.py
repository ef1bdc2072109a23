"""A coordinator's parts in this process, with scripted workers and a store in memory."""

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any

from ampd.errors import UserError
from ampd.handler_stream import HandlerStream
from ampd.perf.presets import load_performance_model
from ampd.policies import registry
from ampd.policies.base import BindingSituation, RoutingSituation
from ampd.serving.admission import Admission
from ampd.serving.placement import PlacementPolicies
from ampd.state.store import SessionLimits, StateUnavailableError
from ampd.state.view import ClusterView
from ampd.types import Moves, PrefillTask, Role, RouteDecision, Slo, WorkerView
from ampd.wire import KvReply, KvRequest
from router.admission import AdmissionGate
from router.guard import StreamGuard
from router.own_tokenizer import OwnTokenizer
from router.placement import Placer, log_left_out
from router.request import parse_round
from router.round_errors import WorkerLostError
from router.round_run import RoundRun
from router.services import RoundOptions, Services
from router.session_memory import SessionMemory
from router.session_moves import SessionMoves
from router.targets import TargetLimits
from router.worker_access import WorkerAccess
from router.worker_deaths import WorkerDeaths
from tests.memory_store import MemoryState, MemoryStore

HANGS = -1
"""In `Workers.fail`: the worker takes the call and never answers."""

SLO = Slo(ttft_s=2.0, itl_s=0.1)
PROMPT = list(range(100, 164))


class FakeContext:
    """Dynamo's context, without Dynamo."""

    trace_id: str | None = None

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self.metadata: dict[str, str] = {}

    def id(self) -> str:
        return "x"

    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop_generating(self) -> None:
        self._stopped.set()

    def trace_headers(self) -> dict[str, str] | None:
        return None

    def detached(self, id: str) -> "FakeContext":  # noqa: ARG002
        return FakeContext()

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        return asyncio.ensure_future(self._stopped.wait())


class Workers:
    """Workers whose next token is the length of the context. `fail` maps (endpoint, worker) to what happens instead.

    Attributes:
        calls: (endpoint, worker, request) of everything that was asked.
        batch: what their reports say of the rounds that still decode.
        alive: workers that answer other calls while their streams break off.
    """

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.calls: list[tuple[str, str, Any]] = []
        self.fail: dict[tuple[str, str], Any] = {}
        self.matched_pages = 0
        self.batch: dict[str, int] = {}
        self.alive = set[str]()

    async def prefill(self, worker_id: str, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        return await self._start("prefill", worker_id, request, context, 1)

    async def generate(self, worker_id: str, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        return await self._start("generate", worker_id, request, context, None)

    async def kv(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:  # noqa: ARG002
        self.calls.append((f"kv {request['op']}", worker_id, request))
        if error := self.fail.get((f"kv {request['op']}", worker_id)):
            raise error
        is_asked_for_life = request == {"op": "match", "keys": []} and worker_id not in self.alive
        if is_asked_for_life and any(worker_id == failing for _, failing in self.fail):
            raise WorkerLostError(worker_id, "gone")
        return {"matched": self.matched_pages} if request["op"] == "match" else {"released_tokens": 0}

    def asked(self, endpoint: str) -> list[str]:
        return [worker for name, worker, _ in self.calls if name == endpoint]

    async def _start(
        self, endpoint: str, worker_id: str, request: Any, context: Any, limit: int | None
    ) -> AsyncIterator[dict[str, Any]]:
        self.calls.append((endpoint, worker_id, request))
        error = self.fail.get((endpoint, worker_id))
        if isinstance(error, Exception):
            raise error
        return self._stream(worker_id, request, limit, error, context)

    async def _stream(
        self, worker_id: str, request: Any, limit: int | None, fails_after: int | None, context: Any
    ) -> AsyncIterator[dict[str, Any]]:
        with suppress(StateUnavailableError):
            await self.store.finish_tasks(worker_id, [request["task"]["task_id"]])
        count: int = limit or (request["request"].get("stop_conditions") or {}).get("max_tokens")
        context_tokens = len(request["token_ids"])
        if fails_after == HANGS:
            await asyncio.get_running_loop().create_future()
        # Without output there is still a last chunk.
        for number in range(max(count, 1)):
            if fails_after == number:
                raise ConnectionError("gone")
            if context.is_stopped():
                return
            await asyncio.sleep(0)
            chunk: dict[str, Any] = {"token_ids": [context_tokens + number] if count else [], "index": 0}
            if number >= count - 1:
                chunk["completion_usage"] = {"prompt_tokens": context_tokens, "completion_tokens": count}
                chunk["ampd"] = dict.fromkeys(
                    ["held_tokens", "cached_tokens", "queued_s", "prefill_s", "kv_read_tokens"], 0
                ) | {"kv_read_bytes": 0, "kv_read_s": 0.0, **self.batch}
                if limit is None:
                    chunk["finish_reason"] = "length"
            yield chunk


class Failing:
    """A binding and a routing by a performance model that lacks a worker's parallelism."""

    def bind(self, _: BindingSituation) -> str:
        raise UserError("the profile has no tp 8")

    def route(self, _: RoutingSituation) -> RouteDecision:
        raise UserError("the profile has no tp 8")


class Replica:
    """One coordinator's parts."""

    def __init__(
        self,
        state: MemoryState,
        routing: str = "always-remote",
        retries: int = 3,
        failing: str | None = None,
        target_floor: float = 0.5,
        max_sessions: int = 0,
        max_wait: float = 0.0,
        max_rounds: int = 0,
        *,
        moves: Moves = "never",
        tokenizer: str = "",
    ) -> None:
        self._targets = TargetLimits(SLO, target_floor)
        self.store = MemoryStore(state)
        limits = SessionLimits(60.0, per_graph=max_sessions)
        sessions = SessionMemory(1 << 20, limits)
        self.view = ClusterView(
            self.store,
            lease_s=60.0,
            serves=OwnTokenizer(tokenizer).serves,
            on_session_end=sessions.forget,
        )
        self.workers = Workers(self.store)
        self.tasks: list[asyncio.Task[None]] = []
        self.in_progress = 1
        model = load_performance_model("tiny-cpu")
        admission = Admission(max_wait, max_rounds, model, SLO, random.Random(1))
        self.gate = AdmissionGate(admission, self.view, lambda: self.in_progress)
        policies = PlacementPolicies(
            Failing() if failing == "binding" else registry.create("binding", "least-kv"),
            Failing() if failing == "routing" else registry.create("routing", routing),
            model,
            random.Random(1),
            log_left_out,
        )
        self.services = Services(
            placer=Placer(
                self.view,
                self.store,
                policies,
                limits=limits,
                suspect_s=60.0,
                gate=self.gate,
                moves=SessionMoves(self.view, moves),
            ),
            access=WorkerAccess(self.view, self.store, self.workers, StreamGuard(self.view, 60.0), 1.0),
            sessions=sessions,
            options=RoundOptions(policy=routing, retries=retries, page_size_tokens=16),
            clock=asyncio.get_running_loop().time,
            spawn=self._spawn,
            deaths=WorkerDeaths(self.store, self._spawn),
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def __aenter__(self) -> "Replica":
        await self.view.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self.tasks)
        await self.view.stop()

    def run(self, session: str | None = "s", context: FakeContext | None = None, **fields: Any) -> RoundRun:
        request = {
            "token_ids": PROMPT,
            "stop_conditions": {"max_tokens": 5},
            "extra_args": {"nvext": {"extra_fields": ["engine_data"]}},
            "agent_context": {"session_id": session},
            **fields,
        }
        return RoundRun(parse_round(request, self._targets), context or FakeContext(), self.services)

    def chunks(
        self, session: str | None = "s", context: FakeContext | None = None, **fields: Any
    ) -> HandlerStream[dict[str, Any]]:
        """The chunks of a round, none joined."""
        return HandlerStream(self.run(session, context, **fields).serve)

    async def round(self, session: str | None = "s", **fields: Any) -> tuple[list[int], dict[str, Any]]:
        """Tokens and record of a round."""
        chunks = [chunk async for chunk in self.chunks(session, **fields)]
        await asyncio.gather(*self.tasks)
        return [token for chunk in chunks for token in chunk["token_ids"]], chunks[-1]["engine_data"]["ampd"]


def worker(name: str, role: Role = Role.DECODE, **fields: Any) -> WorkerView:
    return WorkerView(worker_id=name, role=role, kv_capacity_tokens=10_000, max_context_tokens=1000, **fields)


async def cluster(*views: WorkerView) -> MemoryState:
    state = MemoryState()
    for view in views:
        await MemoryStore(state).publish_worker(view, 60.0)
    return state


async def queues(state: MemoryState) -> dict[str, tuple[PrefillTask, ...]]:
    return {view.worker_id: view.queue for view in await MemoryStore(state).snapshot() if view.queue}
