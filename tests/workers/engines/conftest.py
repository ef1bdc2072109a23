"""One pair of SGLang engines per session, started by forking."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from ampd.tiny_model import make_tiny_model
from tests.harness.forked_engines import DEVICE, forked_engines
from tests.harness.schedule import PAIR, scope_of

if TYPE_CHECKING:
    from tests.harness.sglang_pair import Pair


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Another process would start another pair."""
    if "pair" in getattr(item, "fixturenames", ()):
        assert scope_of(item.nodeid) == PAIR, f"add {item.path.name} to the pair in tests/harness/schedule.py"


@pytest.fixture(scope="session")
def forked() -> Iterator[None]:
    """SGLang's processes are forked from a server that has imported it; not on a GPU, because CUDA survives no fork."""
    with nullcontext() if DEVICE == "cuda" else forked_engines():
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory, forked: None) -> AsyncIterator[Pair]:  # noqa: ARG001
    """A prefill and a decode worker's engine for all tests that leave them whole.

    They run SGLang's overlap schedule, which is the default on a GPU only.
    """
    # Not at the top: NIXL and SGLang may be absent.
    from tests.harness.sglang_pair import LocalPeers, Pair, SwitchedTransport, pair_settings
    from workers.engines.sglang import SglangEngine

    settings = pair_settings(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"), disable_overlap_schedule=False)
    pair = Pair(SglangEngine(settings, SwitchedTransport), SglangEngine(settings, SwitchedTransport), LocalPeers())
    try:
        await pair.prefill.start()
        await pair.decode.start()
        pair.connect()
        yield pair
    finally:
        await pair.prefill.stop()
        await pair.decode.stop()
