"""How much of a prompt's KV counts as held, and what counts as rewritten."""

import asyncio
from collections import Counter
from hashlib import sha256
from typing import Any

import pytest

import ampd.keys
from ampd.keys import KEY_BYTES, page_keys, session_key
from ampd.serving.shared_prefixes import prefix_key
from ampd.types import Role
from router.round_errors import WorkerRefusedError
from tests.router.replica_lab import PROMPT, Replica, cluster, worker

EXPECTED = [64, 65, 66, 67, 68]


async def test_history_is_what_the_decode_worker_holds_of_the_prompt() -> None:
    state = await cluster(worker("d1", held_tokens={session_key("", "s"): 48}), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        replica.workers.matched_pages = 2
        _, record = await replica.round()
        # Another replica served the session before: the worker is asked, by the names of the prompt's pages.
        assert [request["keys"] for name, _, request in replica.workers.calls if name == "kv match"] == [
            page_keys(PROMPT, 16, tenant="")
        ]
        assert (record["hist_tokens"], record["incr_tokens"], record["rewritten"]) == (32, 32, True)
        assert record["kept_tokens"] == 32
        await replica.store.publish_worker(worker("d1", held_tokens={session_key("", "s"): 64}), 60.0)
        await asyncio.sleep(0)
        _, record = await replica.round(token_ids=[*PROMPT, *EXPECTED, 7])
        assert record["hist_tokens"] == 64
        assert record["kept_tokens"] == len([*PROMPT, *EXPECTED])
        await replica.store.publish_worker(worker("d1", held_tokens={session_key("", "s"): 64}), 60.0)
        await asyncio.sleep(0)
        _, record = await replica.round(token_ids=[*PROMPT[:40], 1, 2, 3])
        assert (record["hist_tokens"], record["rewritten"]) == (40, True)
        assert record["kept_tokens"] == 40
        assert len(replica.workers.asked("kv match")) == 1


async def test_each_page_of_a_prompt_is_hashed_once_per_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binding, the question to the owner, the route, and a second placement after a worker was lost ask for keys."""
    hashed: Counter[bytes] = Counter()

    def counted(parent: bytes) -> Any:
        hashed[parent] += len(parent) in (0, KEY_BYTES)  # the names of sessions begin with other bytes
        return sha256(parent)

    name = session_key("", "s")
    strange = [*PROMPT[:8], *range(900, 940)]
    state = await cluster(
        worker("d1", held_tokens={name: 48}, shared_prefixes=prefix(16, strange) | prefix(32)),
        worker("p1", Role.PREFILL, shared_prefixes=prefix(48, strange)),
        worker("p2", Role.PREFILL, shared_prefixes=prefix(48, strange)),
    )
    async with Replica(state) as replica:
        replica.workers.matched_pages = 3
        monkeypatch.setattr(ampd.keys, "sha256", counted)
        await replica.round()
        assert replica.workers.asked("kv match") == ["d1"], "once per placement"
        assert hashed.total() == len(+hashed) == len(PROMPT) // 16


def prefix(tokens: int, token_ids: list[int] = PROMPT, tenant: str = "") -> dict[str, int]:
    return {prefix_key(page_keys(token_ids, 16, tenant=tenant)[tokens // 16 - 1]): tokens}


async def test_what_the_decode_worker_holds_for_other_sessions_is_history() -> None:
    state = await cluster(worker("d1", shared_prefixes=prefix(48)), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        _, record = await replica.round()
        assert (record["hist_tokens"], record["incr_tokens"], record["shared_tokens"]) == (48, 16, 0)
        [request] = [request for name, _, request in replica.workers.calls if name == "prefill"]
        assert (request["source"], request["task"]["hist_tokens"]) == (("d1", 1, ""), 48)


async def test_a_prefill_worker_reads_nothing_that_it_holds_for_other_sessions() -> None:
    views = worker("d1"), worker("p1", Role.PREFILL, shared_prefixes=prefix(48) | prefix(16, [7] * 16))
    async with Replica(await cluster(*views)) as replica:
        _, record = await replica.round()
        assert (record["hist_tokens"], record["incr_tokens"], record["shared_tokens"]) == (48, 16, 48)
        [request] = [request for name, _, request in replica.workers.calls if name == "prefill"]
        assert (request["source"], request["task"]["hist_tokens"]) == (None, 48)


async def test_the_whole_prompt_may_be_shared_and_its_last_token_is_computed() -> None:
    async with Replica(await cluster(worker("d1", shared_prefixes=prefix(64)))) as replica:
        assert (await replica.round())[1]["incr_tokens"] == 1


async def test_another_tenant_s_prefix_is_no_history() -> None:
    async with Replica(await cluster(worker("d1", shared_prefixes=prefix(48, tenant="acme")))) as replica:
        assert (await replica.round())[1]["hist_tokens"] == 0
        assert (await replica.round(routing={"cache_salt": "acme"}))[1]["hist_tokens"] == 48


async def test_a_session_is_bound_where_its_prefix_is_until_that_worker_is_fuller_by_more() -> None:
    state = await cluster(worker("d1", kv_used_tokens=40, shared_prefixes=prefix(48)), worker("d2"))
    async with Replica(state) as replica:
        assert (await replica.round("s"))[1]["decode_worker"] == "d1"
        await replica.store.publish_worker(worker("d1", kv_used_tokens=50, shared_prefixes=prefix(48)), 60.0)
        await asyncio.sleep(0)
        assert (await replica.round("t"))[1]["decode_worker"] == "d2"


@pytest.mark.parametrize("pages", ["x", None, -3, 10**9, True, 1.5])
async def test_a_nonsensical_number_of_held_pages_is_refused(pages: Any) -> None:
    async with Replica(await cluster(worker("d1"))) as replica:
        replica.workers.matched_pages = pages
        with pytest.raises(WorkerRefusedError, match="worker d1 says that it holds"):
            await replica.services.access.matched_pages("d1", [b"key"])
