"""Sessions that leave a worker whose role changes: a coordinator's rounds on four real workers, without Dynamo."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from ampd.state.store import RoleAssigned
from ampd.tiny_model import tiny_model_path
from ampd.types import Role
from tests.memory_store import MemoryState
from tests.router.replica_lab import Replica
from tests.router.site_lab import Site
from tests.workers.engines.modelled_lab import Lab, Times, prompt_of
from tests.workers.parts_lab import worker_parts

ROLES = {"p": "prefill", "d1": "decode", "d2": "decode", "d3": "decode"}
SESSIONS = [f"agent-{number}" for number in range(6)]


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["always-local", "predictive", "always-remote"])
async def test_sessions_leave_a_worker_that_becomes_a_prefill_worker(routing: str) -> None:
    lab = Lab(tiny_model_path(), Times())
    async with AsyncExitStack() as stack:
        parts = {
            name: worker_parts(name, await stack.enter_async_context(lab.engine(name)), lab.times, role=role)
            for name, role in ROLES.items()
        }
        replica = await stack.enter_async_context(Replica(MemoryState(), routing, moves="any"))
        site = Site(replica, parts)
        contexts, owners = {}, {}
        for number, name in enumerate(SESSIONS):
            await site.publish()
            prompt = prompt_of(320, seed=number)
            output, made = await site.round(name, prompt)
            contexts[name], owners[name] = prompt + output, made["decode_worker"]

        leaving = owners[SESSIONS[0]]
        leavers = [name for name, owner in owners.items() if owner == leaving]
        assert len(leavers) < len(SESSIONS)
        parts[leaving].role.adopt(RoleAssigned(leaving, Role.PREFILL, "", "test"))
        for number, name in enumerate(SESSIONS):
            await site.publish()
            prompt = contexts[name] + prompt_of(64, seed=100 + number)
            output, made = await site.round(name, prompt)
            assert output == (await site.round(f"fresh-{name}", prompt))[0]
            assert (made["epoch"], made["move_reason"]) == ((2, "role") if name in leavers else (1, ""))
            assert (made["decode_worker"] == owners[name]) is (name not in leavers)
            assert not made["hit_tokens"].get("recomputed")
            keeps = leaving in (made["prefill_worker"], made["decode_worker"])
            assert bool(await site.held(leaving, name)) is keeps
            contexts[name], owners[name] = prompt + output, made["decode_worker"]

        for number, name in enumerate(SESSIONS):
            await site.publish()
            output, made = await site.round(name, contexts[name] + prompt_of(64, seed=200 + number))
            assert (made["decode_worker"], made["move_reason"]) == (owners[name], "")
            assert not made["hit_tokens"].get("recomputed")
        assert replica.services.placer.moves_made == {"role": len(leavers)}
