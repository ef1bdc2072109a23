"""Where the store listens by which ranks meet: torch's real one, in this process."""

import importlib
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.harness.listening import is_loopback, listening
from tests.harness.ports import free_ports
from workers.engines.sglang_plugin import on_loopback

pytestmark = pytest.mark.slow
rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
TIMEOUT = timedelta(seconds=60)


def free_port() -> int:
    return free_ports(1)[0]


def addresses_of(port: int) -> list[str]:
    return [address for address in listening([os.getpid()]) if address.endswith(f":{port}")]


def meet(make: Any, hostname: str, port: int) -> bytes:
    """Two ranks meet, and one reads what the other wrote."""
    first = make(hostname, port, 0, 1)
    second = make(hostname, port, 1, 1)
    second.set("from", b"second")
    found: bytes = first.get("from")
    return found


def ours(hostname: str, port: int, rank: int, world_size: int) -> Any:
    return on_loopback(rendezvous._create_c10d_store, hostname, port, rank, world_size, TIMEOUT)


@pytest.mark.parametrize("hostname", ["127.0.0.1", "::1"])
def test_ranks_that_meet_on_loopback_listen_there_only(hostname: str) -> None:
    port = free_port()
    store = ours(hostname, port, 0, 1)
    (address,) = addresses_of(port)
    assert is_loopback(address)
    assert meet(ours, hostname, free_port()) == b"second"
    del store


def test_without_the_hook_torch_listens_everywhere() -> None:
    """In a process of its own, because a test of engines may have put the hook into this one."""
    code = (
        "import datetime, importlib, sys\n"
        "rendezvous = importlib.import_module('torch.distributed.rendezvous')\n"
        "store = rendezvous._create_c10d_store('127.0.0.1', int(sys.argv[1]), 0, 1, datetime.timedelta(seconds=20))\n"
        "print('made', flush=True)\n"
        "sys.stdin.read()"
    )
    port, pipe = free_port(), subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, str(port)], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        (address,) = [address for address in listening([process.pid]) if address.endswith(f":{port}")]
        process.communicate()
    assert not is_loopback(address)


def test_ranks_of_several_machines_meet_as_they_did() -> None:
    made = []
    on_loopback(lambda *arguments: made.append(arguments), "10.0.0.7", 1234, 0, 2, TIMEOUT)
    on_loopback(lambda *arguments: made.append(arguments), "127.0.0.1", 1234, 1, 2, TIMEOUT)
    assert [arguments[:4] for arguments in made] == [("10.0.0.7", 1234, 0, 2), ("127.0.0.1", 1234, 1, 2)]
