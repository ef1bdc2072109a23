"""A coordinator's parts in this process, with scripted workers and a store in memory."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, cast
from uuid import uuid4

from ampd.background_tasks import BackgroundTasks
from ampd.errors import UserError
from ampd.handler_stream import Chunk, HandlerStream, Send
from ampd.keys import TOKEN_BYTES
from ampd.perf.presets import load_performance_model
from ampd.policies import registry
from ampd.policies.base import BindingSituation, RoutingSituation
from ampd.round_end import LINK, Begun
from ampd.serving.admission import Admission
from ampd.serving.placement import PlacementPolicies
from ampd.state.redis_store import StateStore
from ampd.state.store import SessionLimits, StateUnavailableError
from ampd.state.view import ClusterView
from ampd.types import Moves, PrefillTask, Role, RouteDecision, Slo, WorkerView
from ampd.wire import KvReply, KvRequest, error_text, parse_error
from router.admission import AdmissionGate
from router.calls import worker_error
from router.own_graph import OwnGraph
from router.placement import Placer, log_left_out
from router.request import parse_round
from router.round_ends import RoundEnds
from router.round_errors import RoundRefusedError, WorkerLostError, WorkerRefusedError
from router.round_run import RoundRun, Services, pipe
from router.round_window import Counts
from router.session_branches import SessionBranches
from router.session_memory import SessionMemory
from router.targets import TargetLimits
from router.worker_access import WorkerAccess
from router.worker_deaths import WorkerDeaths
from tests.memory_store import MemoryState, MemoryStore
from workers.client_rounds import ClientRounds
from workers.engines.base import EngineError
from workers.session_releaser import SessionEnds

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
        contexts: of all calls.
    """

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.calls: list[tuple[str, str, Any]] = []
        self.fail: dict[tuple[str, str], Any] = {}
        self.matched_pages = 0
        self.batch: dict[str, int] = {}
        self.alive = set[str]()
        self.contexts: list[Any] = []

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
        self.contexts.append(context)
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
        context_tokens = len(request["prompt"]) // TOKEN_BYTES
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


class Answering:
    """The workers as a coordinator calls them: they answer clients, and tell what became of their rounds.

    A worker whose own stream breaks off has died: it says no more.
    """

    def __init__(
        self,
        workers: Workers,
        ends: Callable[[], RoundEnds[RoundRun]],
        spawn: Callable[[Coroutine[Any, Any, None]], None] | None = None,
    ) -> None:
        self._workers = workers
        self._ends = ends
        self._spawn = spawn or BackgroundTasks().spawn

    async def kv(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        return await self._workers.kv(worker_id, request, timeout_s)

    async def hand_on(self, frame: Any, worker_id: str, request: Any) -> None:
        raise NotImplementedError

    async def generate(self, worker_id: str, request: Any, context: Any) -> HandlerStream[Chunk]:
        call = AnsweredCall(worker_id, self._workers, self._ends(), self._spawn, context)
        if "prefill" not in request["start"]:
            try:
                call.own = await self._workers.generate(worker_id, request, context)
            except Exception as error:
                raise worker_error(worker_id, error) from None
        return HandlerStream(partial(call.serve, request), context=context)


class AnsweredCall:
    """One round at its decode worker: the worker's own code around its scripted engine and prefill worker."""

    def __init__(
        self,
        worker_id: str,
        workers: Workers,
        ends: RoundEnds[RoundRun],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        context: Any,
    ) -> None:
        self.own: Any = None
        self._worker_id = worker_id
        self._workers = workers
        self._ends = ends
        self._spawn = spawn
        self._context = context
        self._has_died = False

    async def serve(self, request: Any, send: Send[Chunk]) -> None:
        def send_alive(chunk: Chunk) -> None:
            if not self._has_died:
                send(chunk)

        own: Any = self
        clock = asyncio.get_running_loop().time
        sessions = SessionEnds(cast(StateStore, self._workers.store), self._worker_id)
        rounds = ClientRounds(self._worker_id, own, own, own, sessions, context_limit=1000, clock=clock)
        await rounds.serve(request, self._context, send_alive)
        await rounds._background.finish(10.0)
        if not self._has_died:
            self._spawn(sessions.stop())
        if self._has_died:
            await self._ends._unless_alive(self._worker_id, self._ends._of(self._worker_id))
            raise ConnectionError("gone")

    async def prefill(self, worker_id: str, request: Any, context: Any) -> AsyncIterator[Chunk]:
        try:
            return await self._workers.prefill(worker_id, request, context)
        except WorkerRefusedError as error:
            raise RuntimeError(error_text(error.status, str(error))) from None

    async def lives(self, worker_id: str) -> bool:
        try:
            await self._workers.kv(worker_id, {"op": "match", "keys": []}, 1.0)
        except WorkerLostError:
            return False
        return True

    async def kv(self, request: KvRequest) -> KvReply:
        return await self._workers.kv(self._worker_id, request, 1.0)

    async def generate(self, request: Any, send: Send[Chunk]) -> None:
        own, self.own = self.own, None
        try:
            async for chunk in own or await self._workers.generate(self._worker_id, request, self._context):
                send(chunk)
        except WorkerRefusedError as error:
            raise EngineError(str(error), error.status) from None
        except (ConnectionError, WorkerLostError):
            self._has_died = True
            raise
        except RuntimeError as error:
            raise engine_error(str(error)) from None

    def begins(self, address: str, request_id: str) -> None:
        self.tell(address, Begun(request_id))

    def tell(self, _address: str, told: Any) -> None:
        if not self._has_died:
            self._ends._told(self._worker_id, told)


def engine_error(text: str) -> EngineError:
    status, message = parse_error(text) or (500, text)
    return EngineError(message, status)


MIGRATIONS = 3


class Frontend:
    """Dynamo's frontend: it sends a request again whose worker was lost, with what has come out."""

    def __init__(self, replica: "Replica", context: Any, request: dict[str, Any]) -> None:
        self._replica = replica
        self._context = context
        self._request = request
        self._id = uuid4().hex
        self.session_id = ""
        self._tokens: list[int] = []
        self._link: Any = None
        self._error: dict[str, Any] | None = None

    async def serve(self, send: Send[Chunk]) -> None:
        for _ in range(MIGRATIONS + 1):
            self._error = None
            await pipe(await self.run(), self._replica.calls, self._context, partial(self._take, send))
            if (error := self._failed()) is None:
                return
            if error["reason"] != "backend.worker_unavailable":
                break
        assert error is not None
        raise RoundRefusedError(_STATUSES.get(error["class"], 500), error["message"])

    def _failed(self) -> dict[str, Any] | None:
        return self._error

    async def run(self) -> RoundRun:
        services, request = self._replica.services, self._request
        if self._link is not None:
            stops = dict(request["stop_conditions"])
            stops["max_tokens"] -= len(self._tokens)
            tokens = [*request["token_ids"], *self._tokens]
            request = {**request, "token_ids": tokens, "stop_conditions": stops, "migration_link": self._link}
        before = await services.ends.before(self._id)
        parsed = parse_round(request, self._replica.targets)
        self.session_id = parsed.session_id
        return RoundRun(parsed, self._id, services, before)

    def _take(self, send: Send[Chunk], chunk: Chunk) -> None:
        self._error = chunk.get("error")
        if self._error is None:
            self._link = self._link or chunk.get(LINK)
            self._tokens += [] if chunk.get("index") else chunk.get("token_ids") or []
            send(chunk)


_STATUSES = {"InvalidRequest": 400, "RateLimited": 429, "Unavailable": 503}


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
        self.targets = TargetLimits(SLO, target_floor)
        self.store = MemoryStore(state)
        limits = SessionLimits(60.0, per_graph=max_sessions)
        sessions = SessionMemory(1 << 20, limits)
        branches = SessionBranches(sessions, limits.new_ttl_s)
        self.own = OwnGraph(tokenizer)
        self.view = ClusterView(
            self.store,
            lease_s=60.0,
            serves=self.own.serves,
            on_session_end=branches.forget,
        )
        self.workers = Workers(self.store)
        self.tasks: list[asyncio.Task[object]] = []
        self.in_progress = 1
        model = load_performance_model("tiny-cpu")
        admission = Admission(max_wait, max_rounds, model, SLO, random.Random(1))
        self.counts = Counts()
        self.gate = AdmissionGate(admission, self.view, lambda: self.in_progress, self.counts)
        policies = PlacementPolicies(
            Failing() if failing == "binding" else registry.create("binding", "least-kv"),
            Failing() if failing == "routing" else registry.create("routing", routing),
            model,
            random.Random(1),
            log_left_out,
        )
        self.calls = cast(Any, Answering(self.workers, lambda: self.services.ends, self._spawn))
        self.refusals: list[tuple[int, str]] = []
        access = WorkerAccess(self.view, self.store, self.calls, 1.0)
        self.services = Services(
            placer=Placer(
                self.view,
                self.store,
                policies,
                limits=limits,
                suspect_s=60.0,
                gate=self.gate,
                spawn=self._spawn,
                counts=self.counts,
                moves=moves,
                rebound=sessions.rebound,
            ),
            access=access,
            sessions=sessions,
            branches=branches,
            policy=routing,
            retries=retries,
            page_size_tokens=16,
            clock=asyncio.get_running_loop().time,
            spawn=self._spawn,
            deaths=WorkerDeaths(self.store),
            ends=RoundEnds(access.lost),
            refused=lambda *refusal: self.refusals.append(refusal),
        )

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def __aenter__(self) -> "Replica":
        await self.view.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self.tasks)
        await self.view.stop()

    def frontend(self, session: str | None = "s", context: FakeContext | None = None, **fields: Any) -> Frontend:
        request = {
            "token_ids": PROMPT,
            "stop_conditions": {"max_tokens": 5},
            "extra_args": {"nvext": {"extra_fields": ["engine_data"]}},
            "agent_context": {"session_id": session},
            **fields,
        }
        return Frontend(self, context or FakeContext(), request)

    def chunks(
        self, session: str | None = "s", context: FakeContext | None = None, **fields: Any
    ) -> HandlerStream[dict[str, Any]]:
        """The chunks of a round, none joined."""
        return HandlerStream(self.frontend(session, context, **fields).serve)

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
