"""What tests of several packages share: one Redis and one fork server per session, one graph per module."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import Scheduling

from tests.harness.fork_server import ForkServer
from tests.harness.graph import PRELOADED, Graph, empty_graph
from tests.harness.schedule import ByScope, slowest_first
from tests.harness.tcp_redis import TcpRedis

# Enough examples to find the errors that were put in to try the properties. A test that needs more asks for more.
# The time of an example says more about the machine than about the code, and so does the time to draw it.
settings.register_profile("ampd", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ampd")

# Many images switch bytecode off. Then each process that a test starts would compile all of SGLang again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests of SGLang where slow tests are left out: SGLang takes ten seconds to import."""
    return (collection_path.match("test_sglang*.py") and "not slow" in config.option.markexpr) or None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """Keep together what shares a graph or engines, where a run has several processes."""
    config.option.loadscopereorder = False
    return ByScope(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the slow ones, where a run has several processes."""
    if hasattr(config, "workerinput"):
        slowest_first(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set the root logger back, because SGLang sets it to ERROR in a process that starts an engine.

    Skip what needs a GPU where there is none. torch is asked only then, because it takes seconds to import.
    """
    logging.getLogger().setLevel(logging.WARNING)
    if item.get_closest_marker("gpu") and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("no NVIDIA GPU")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[TcpRedis]:
    """A Redis for everybody; each test or module has its own namespace in it."""
    with TcpRedis() as server:
        yield server


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Starts the processes of graphs."""
    with ForkServer(PRELOADED) as server:
        yield server


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory, redis_server: TcpRedis, fork_server: ForkServer) -> Iterator[Graph]:
    """The graph of a module, in its own namespace and without processes."""
    with empty_graph(tmp_path_factory.mktemp("graph"), redis_server.url, fork_server) as graph:
        yield graph
