"""Processes of a local graph that hang are ended; those that answer, whatever it is, are left alone."""

import asyncio
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
import yaml

from ampd.cli.serve import processes
from ampd.cli.serve.processes import LivenessProbe, ProcessSpec, Supervisor
from tests.waiting import PATIENCE_S, until

SERVER = "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.BaseHTTPRequestHandler); "
SERVER += "print(s.server_port, flush=True); s.serve_forever()"


@pytest.mark.slow
async def test_a_process_that_hangs_is_ended_and_no_other(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    urls = {}
    try:
        for name in ("hangs", "lives"):
            supervisor.start(ProcessSpec(name, (sys.executable, "-c", SERVER)))
            log = tmp_path / f"{name}.log"
            port = await until(lambda log=log: re.match(r"(\d+)\n", log.read_text()), timeout_s=60)
            urls[name] = f"http://127.0.0.1:{port[1]}/live"
        (hanging,) = [child.process.pid for child in supervisor._children if child.spec.name == "hangs"]
        os.kill(hanging, signal.SIGSTOP)
        lines: list[str] = []
        # The timeout is long enough for a process that lives on a busy machine.
        probe = LivenessProbe(urls, period_s=0.01, timeout_s=7.0, failures=3)
        probing = asyncio.create_task(probe.end_hanging(supervisor, lines.append))
        try:
            await until(supervisor.ended, timeout_s=120)
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
        assert list(supervisor.ended()) == ["hangs"]
        assert lines == [f"hangs hangs: no answer at {urls['hangs']} 3 times; it is ended"]
    finally:
        supervisor.stop()


async def test_a_process_that_was_started_again_is_watched_again(tmp_path: Path) -> None:
    supervisor, lines = Supervisor(tmp_path), list[str]()
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))  # nobody listens there, so that each question fails at once
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/live"
        supervisor.start(ProcessSpec("hangs", (sys.executable, "-c", "import time; time.sleep(1000)")))
        # On a busy machine a killed process ends late. It must have ended before the next three questions.
        probing = asyncio.create_task(
            LivenessProbe({"hangs": url}, period_s=0.2, failures=3).end_hanging(supervisor, lines.append)
        )
        try:
            for times in (1, 2):
                await until(supervisor.ended)
                assert lines == [f"hangs hangs: no answer at {url} 3 times; it is ended"] * times
                supervisor.start_again("hangs")
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
            supervisor.stop()


async def test_the_probe_goes_on_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, asked = Supervisor(tmp_path), asyncio.Event()

    def ended() -> dict[str, str]:
        if not caplog.records:
            raise OSError("too many open files")
        asked.set()
        return {}

    monkeypatch.setattr(supervisor, "ended", ended)
    probing = LivenessProbe({}, period_s=0.01).task(supervisor, print)
    probing.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asked.wait()
    finally:
        await probing.stop()
    assert [record.getMessage() for record in caplog.records] == ["liveness probe failed; trying again"]


def test_it_is_the_probe_of_a_pod() -> None:
    graph = Path(__file__).parents[4] / "k8s" / "base" / "graph.yaml"
    probes = [found["livenessProbe"] for each in yaml.safe_load_all(graph.read_text()) for found in containers(each)]
    assert probes
    for probe in probes:
        assert (probe["periodSeconds"], probe["timeoutSeconds"], probe["failureThreshold"]) == (
            processes.PERIOD_S,
            processes.TIMEOUT_S,
            processes.FAILURES,
        )


def containers(node: object) -> list[dict[str, dict[str, float]]]:
    """All parts of a document that have a liveness probe."""
    if isinstance(node, list):
        return [found for part in node for found in containers(part)]
    if not isinstance(node, dict):
        return []
    own = [node] if "livenessProbe" in node else []
    return own + [found for part in node.values() for found in containers(part)]
