"""A graph of `ampd serve` whose model leaves and comes back, and whose folder of discovery is deleted.

It has a user namespace of its own, in which the kernel allows few inotify instances.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.harness.watches import wait_for_watches
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.long]

INSTANCES = 31
"""A prefill and a decode worker, a coordinator and a frontend begin with 25."""
LIMITED = ("unshare", "--user", "--map-root-user", "sh", "-c")
LIMIT = f'echo {INSTANCES} > /proc/sys/user/max_inotify_instances && exec "$@"'
SERVE = ("ampd", "serve", "--port", "0", "--engine", "modelled", "--prefill", "1", "--decode", "1")


def can_limit() -> bool:
    return subprocess.run([*LIMITED, LIMIT, "-", "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """For the graph's temporary files. Its name is short, because the path of a socket must be."""
    with tempfile.TemporaryDirectory(prefix="ampd-") as name:
        yield Path(name)


def until(is_so: Callable[[], object], serve: subprocess.Popen[bytes], output: Path) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert serve.poll() is None, output.read_text()
        assert time.monotonic() < give_up_s, output.read_text()
        time.sleep(0.1)


def is_served(url: str) -> bool:
    try:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.skipif(not can_limit(), reason="needs a user namespace")
def test_models_that_come_back_take_no_inotify_instances_and_a_graph_without_discovery_ends(folder: Path) -> None:
    wait_for_watches(4)
    output = folder / "output"
    with output.open("wb") as file:
        argv = [*LIMITED, LIMIT, "-", sys.executable, "-m", *SERVE, "--log-dir", str(folder / "logs")]
        serve = subprocess.Popen(argv, stdout=file, stderr=file, env={**os.environ, "TMPDIR": str(folder)})
    try:
        until(lambda: "ready: " in output.read_text(), serve, output)
        url = output.read_text().split("ready: ")[1].split()[0]
        (discovery,) = folder.glob("ampd-serve-*/discovery")
        for _ in range(4):
            # As other processes do when the coordinator stands still. Six instances are left.
            for kind in ("mdc", "instances"):
                for entry in (discovery / "v1" / kind).glob("*coordinator*"):
                    entry.unlink(missing_ok=True)
            until(lambda: httpx.get(f"{url}/v1/models").json()["data"] == [], serve, output)
            until(lambda: is_served(url), serve, output)
        assert "it starts again in" not in output.read_text()
        assert list(folder.glob("tmp*")) == [], "files that would outlive the graph"
        discovery.rename(folder / "elsewhere")
        assert serve.wait(PATIENCE_S) == 1
        assert f"the folder {discovery} was deleted." in output.read_text()
    finally:
        serve.send_signal(signal.SIGINT)
        serve.wait(PATIENCE_S)
