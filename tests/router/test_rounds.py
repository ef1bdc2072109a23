"""Rounds against workers that play their part in this process: conflicts, failures and what is left behind."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from ampd.page_keys import page_keys
from ampd.perf.piecewise import load_performance_model
from ampd.policies import registry
from ampd.state.store import StateUnavailableError
from ampd.state.view import ClusterView
from ampd.types import PrefillTask, Role, Slo, WorkerView
from router.errors import RequestError, WorkerLostError, WorkerRefusedError
from router.guard import StreamGuard
from router.placement import Placer, deterministic_choice
from router.request import parse_round
from router.rounds import RoundRun, Services
from router.sessions import SessionMemory
from tests.memory_store import MemoryState, MemoryStore

SLO = Slo(ttft_s=2.0, itl_s=0.1)
PROMPT = list(range(100, 164))


class FakeContext:
    """Dynamo's context, without Dynamo."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()

    def id(self) -> str:
        return "x"

    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop_generating(self) -> None:
        self._stopped.set()

    def detached(self, id: str) -> "FakeContext":  # noqa: ARG002
        return FakeContext()

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        return asyncio.ensure_future(self._stopped.wait())


class Workers:
    """Workers whose next token is the length of the context. `fail` maps (endpoint, worker) to what happens instead.

    Attributes:
        calls: (endpoint, worker, request) of everything that was asked.
        batch: what their reports say of the rounds that still decode.
    """

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.calls: list[tuple[str, str, Any]] = []
        self.fail: dict[tuple[str, str], Any] = {}
        self.matched_pages = 0
        self.batch: dict[str, int] = {}

    async def prefill(self, worker_id: str, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        return await self._start("prefill", worker_id, request, context, 1)

    async def generate(self, worker_id: str, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        return await self._start("generate", worker_id, request, context, None)

    async def kv(self, worker_id: str, request: Any, timeout_s: float) -> dict[str, Any]:  # noqa: ARG002
        self.calls.append((f"kv {request['op']}", worker_id, request))
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
            await self.store.finish_task(worker_id, request["task"]["task_id"])
        count = limit or (request["request"].get("stop_conditions") or {}).get("max_tokens")
        context_tokens = len(request["token_ids"])
        for number in range(count):
            if fails_after == number:
                raise WorkerLostError(worker_id, "gone")
            if context.is_stopped():
                return
            await asyncio.sleep(0)
            chunk: dict[str, Any] = {"token_ids": [context_tokens + number], "index": 0}
            if number == count - 1:
                chunk["completion_usage"] = {"prompt_tokens": context_tokens, "completion_tokens": count}
                chunk["ampd"] = dict.fromkeys(
                    ["held_tokens", "cached_tokens", "queued_s", "prefill_s", "kv_read_tokens"], 0
                ) | {"kv_read_bytes": 0, "kv_read_s": 0.0, **self.batch}
                if limit is None:
                    chunk["finish_reason"] = "length"
            yield chunk


class Replica:
    """One coordinator's parts."""

    def __init__(self, state: MemoryState, routing: str = "always-remote", retries: int = 3) -> None:
        self.store = MemoryStore(state)
        self.view = ClusterView(self.store, lease_s=60.0)
        self.workers = Workers(self.store)
        self.tasks: list[asyncio.Task[None]] = []
        self.services = Services(
            placer=Placer(
                self.view,
                self.store,
                registry.create("binding", "least-kv"),
                registry.create("routing", routing),
                load_performance_model("tiny-cpu"),
                session_ttl_s=60.0,
                suspect_s=60.0,
                rng=random.Random(1),
            ),
            calls=self.workers,
            sessions=SessionMemory(1 << 20),
            guard=StreamGuard(self.view, 60.0),
            clock=asyncio.get_running_loop().time,
            spawn=lambda work: self.tasks.append(asyncio.create_task(work)),
            policy=routing,
            retries=retries,
            page_size=16,
            call_timeout_s=1.0,
        )

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
        return RoundRun(parse_round(request, SLO), context or FakeContext(), self.services)

    async def round(self, session: str | None = "s", **fields: Any) -> tuple[list[int], dict[str, Any]]:
        """Tokens and record of a round."""
        chunks = [chunk async for chunk in self.run(session, **fields).serve()]
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


EXPECTED = [64, 65, 66, 67, 68]


@pytest.mark.parametrize("routing", ["always-remote", "always-local"])
async def test_a_round_gives_the_same_tokens_on_both_routes(routing: str) -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state, routing) as one:
        tokens, record = await one.round()
        assert tokens == EXPECTED
        assert record["route"] == routing.removeprefix("always-")
        assert one.store.round_trips.calls["route"] == 1
    assert await queues(state) == {}


async def test_the_loser_of_a_race_follows_the_winner() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as one, Replica(state) as other:
        await one.round("s")
        # The other replica would now choose d2, for d1 has more to do; it does not know of the session.
        await other.store.publish_worker(worker("d1", kv_used_tokens=5000), 60.0)
        await asyncio.sleep(0)
        _, record = await other.round("s")
        assert record["decode_worker"] == "d1"
        assert other.workers.asked("generate") == ["d1"]


async def test_a_session_stays_at_a_worker_that_becomes_a_prefill_worker() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as one:
        await one.round("s")
        await one.store.publish_worker(worker("d1", Role.PREFILL), 60.0)
        await asyncio.sleep(0)
        _, record = await one.round("s")
        # The only prefill worker is its own decode worker: that is not remote.
        assert (record["decode_worker"], record["epoch"], record["reason"]) == ("d1", 1, "no-prefill-worker")
        _, record = await one.round("new")
        assert (record["decode_worker"], record["prefill_worker"]) == ("d2", "d1")


@pytest.mark.parametrize(
    ("targets", "missed"), [({}, False), ({"ttft_target": 1e-6}, True), ({"itl_target": 1e-6}, True)]
)
async def test_a_session_that_missed_a_target_is_known_for_it(targets: dict[str, float], missed: bool) -> None:
    state = await cluster(worker("d1"))
    async with Replica(state) as one:
        await one.round("s", router=targets)
        await one.round("s")
        await one.round("s")
        await one.round("other")
        tasks = [request["task"] for _, _, request in one.workers.calls if "task" in request]
        assert [task["session_missed"] for task in tasks] == [False, missed, missed, False]


async def test_a_dead_worker_s_session_moves_with_the_next_epoch() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as one:
        assert (await one.round())[1]["decode_worker"] == "d1"
        await one.store.remove_worker("d1")
        await asyncio.sleep(0)
        _, record = await one.round()
        assert (record["decode_worker"], record["epoch"]) == ("d2", 2)
        assert (await one.store.binding("s")).epoch == 2


async def test_a_decode_worker_lost_in_mid_stream_is_replaced_and_reads_from_the_prefill_worker() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1), worker("p1", Role.PREFILL))
    async with Replica(state) as one:
        one.workers.fail["generate", "d1"] = 2
        tokens, record = await one.round()
        assert tokens == EXPECTED
        assert (record["retries"], record["reason"], record["decode_worker"]) == (1, "resumed", "d2")
        again = [request for name, worker_id, request in one.workers.calls if (name, worker_id) == ("generate", "d2")]
        assert again[0]["source_worker_id"] == "p1"
        assert again[0]["token_ids"] == PROMPT + EXPECTED[:3]
        assert again[0]["request"]["stop_conditions"]["max_tokens"] == 2
    assert await queues(state) == {}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (WorkerLostError("p1", "gone"), "prefill-worker-lost"),
        (WorkerRefusedError("p1", 500, "no"), "prefill-worker-refused"),
    ],
)
async def test_a_prefill_that_fails_is_done_locally(error: Exception, reason: str) -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as one:
        one.workers.fail["prefill", "p1"] = error
        tokens, record = await one.round()
        assert tokens == EXPECTED
        assert (record["route"], record["reason"]) == ("local", reason)
        assert (one.view.worker("p1") is None) == isinstance(error, WorkerLostError)
    assert await queues(state) == {}


async def test_what_cannot_be_continued_ends_with_503() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as one:
        one.workers.fail["generate", "d1"] = 2
        with pytest.raises(RequestError, match="presence_penalty") as refusal:
            await one.round(sampling_options={"presence_penalty": 1.0})
        assert refusal.value.status == 503


async def test_a_round_survives_no_more_workers_than_allowed() -> None:
    names = [f"d{number}" for number in range(4)]
    state = await cluster(*(worker(name) for name in names))
    async with Replica(state, retries=2) as one:
        one.workers.fail |= {("generate", name): WorkerLostError(name, "gone") for name in names}
        with pytest.raises(RequestError, match="3 workers failed") as refusal:
            await one.round()
        assert refusal.value.status == 503
        assert len(set(one.workers.asked("generate"))) == 3


async def test_a_refusal_is_the_client_s_with_its_status() -> None:
    state = await cluster(worker("d1"))
    async with Replica(state) as one:
        one.workers.fail["generate", "d1"] = WorkerRefusedError("d1", 400, "bad grammar")
        with pytest.raises(RequestError, match="bad grammar") as refusal:
            await one.round()
        assert refusal.value.status == 400


async def test_no_decode_worker_is_503_and_a_long_prompt_400_with_both_numbers() -> None:
    async with Replica(await cluster(worker("p1", Role.PREFILL))) as one:
        with pytest.raises(RequestError) as refusal:
            await one.round()
        assert refusal.value.status == 503
    async with Replica(await cluster(worker("d1"))) as one:
        with pytest.raises(RequestError, match=r"1000 tokens.*1000 tokens") as refusal:
            await one.round(token_ids=[1] * 1000)
        assert refusal.value.status == 400


async def test_replicas_without_the_store_agree_on_new_sessions_and_tell_it_later() -> None:
    views = [worker(f"d{number}", kv_used_tokens=number) for number in range(5)]
    state = await cluster(*views)
    async with Replica(state) as one, Replica(state) as other:
        before = (await one.round("known"))[1]["decode_worker"]
        state.lose()
        assert (await one.round("known"))[1]["decode_worker"] == before
        chosen = {}
        for name in ("a", "b", "c", "d", "e", "f"):
            chosen[name] = (await one.round(name))[1]["decode_worker"]
            assert (await other.round(name))[1]["decode_worker"] == chosen[name]
            assert chosen[name] == deterministic_choice(name, views).worker_id
        assert len(set(chosen.values())) > 1
        state.restore(empty=True)
        for replica in (one, other):
            replica.services.placer._store_retry_s = 0.0
        assert (await one.round("a"))[1]["decode_worker"] == chosen["a"]
        assert (await other.store.binding("a")).worker_id == chosen["a"]


async def test_history_is_what_the_decode_worker_holds_of_the_prompt() -> None:
    state = await cluster(worker("d1", held_tokens={"s": 48}), worker("p1", Role.PREFILL))
    async with Replica(state) as one:
        one.workers.matched_pages = 2
        _, record = await one.round()
        # Another replica served the session before: the worker is asked, by the names of the prompt's pages.
        assert [request["keys"] for name, _, request in one.workers.calls if name == "kv match"] == [
            page_keys(PROMPT, 16)
        ]
        assert (record["hist_tokens"], record["incr_tokens"], record["rewritten"]) == (32, 32, True)
        await one.store.set_held("d1", "s", 64)
        await asyncio.sleep(0)
        _, record = await one.round(token_ids=[*PROMPT, *EXPECTED, 7])
        assert record["hist_tokens"] == 64
        await one.store.set_held("d1", "s", 64)
        await asyncio.sleep(0)
        _, record = await one.round(token_ids=[*PROMPT[:40], 1, 2, 3])
        assert (record["hist_tokens"], record["rewritten"]) == (40, True)
        assert len(one.workers.asked("kv match")) == 1


async def test_a_round_s_end_tells_who_still_decodes() -> None:
    busy = worker("d1", decode_batch=2, decode_context_tokens=900)
    async with Replica(await cluster(busy, worker("p1", Role.PREFILL))) as one:
        await one.round()
        assert one.view.decode() == (busy,)  # a worker that does not say
        one.workers.batch = {"decode_batch": 1, "decode_context_tokens": 400}
        await one.round()
        (view,) = one.view.decode()
        assert (view.decode_batch, view.decode_context_tokens) == (1, 400)


async def test_the_last_round_releases_the_session_where_it_is_held() -> None:
    state = await cluster(
        worker("d1"), worker("d2", kv_used_tokens=9), worker("p1", Role.PREFILL), worker("p2", Role.PREFILL)
    )
    async with Replica(state) as one:
        await one.round()
        await one.store.set_held("p2", "s", 16)
        await asyncio.sleep(0)
        used = {"d1", "p2", *one.workers.asked("prefill")}
        await one.round(agent_context={"session_id": "s", "session_final": True})
        assert set(one.workers.asked("kv release_session")) == used | set(one.workers.asked("prefill"))
        assert await one.store.binding("s") is None
        assert one.services.sessions.binding("s") is None


async def test_a_round_that_ends_at_the_prefill_worker_is_taken_over() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as one:
        tokens, _ = await one.round(stop_conditions={"max_tokens": 1})
        assert tokens == EXPECTED[:1]
        ((_, worker_id, request),) = [call for call in one.workers.calls if call[0] == "generate"]
        assert (worker_id, request["source_worker_id"]) == ("d1", "p1")
        assert request["request"]["stop_conditions"]["max_tokens"] == 0
        assert request["token_ids"] == [*PROMPT, 64]


async def test_a_client_that_leaves_before_the_worker_was_reached_leaves_no_entry() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as one:
        context = FakeContext()

        async def never(*_: Any) -> Any:
            context.stop_generating()
            raise WorkerLostError("p1", "unreachable")

        one.workers.prefill = never  # type: ignore[method-assign]
        chunks = [chunk async for chunk in one.run(context=context).serve()]
        assert chunks == []
        await asyncio.gather(*one.tasks)
        assert one.workers.asked("generate") == []
        assert await queues(state) == {}


async def test_a_model_that_lacks_a_worker_s_parallelism_does_not_fail_rounds() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as one:
        one.services.placer._routing = SimpleNamespace(route=raising)  # type: ignore[assignment]
        tokens, record = await one.round()
        assert tokens == EXPECTED
        assert (record["route"], record["reason"]) == ("local", "no-performance-model")


async def test_nor_does_it_fail_a_binding() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as one:
        one.services.placer._binding = SimpleNamespace(bind=raising)  # type: ignore[assignment]
        tokens, record = await one.round()
        assert tokens == EXPECTED
        assert record["decode_worker"] == "d1"


def raising(*_: Any) -> Any:
    from ampd.errors import UserError

    raise UserError("the profile has no tp 8")
