"""What `ampd serve` says of a process that ended."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from ampd.cli.serve.processes import ProcessSpec, Supervisor, reason_of, signal_of
from tests.harness.process_ends import wait_for

NOISE = "\nprint('[2026-11-22 02:00:00] kill_process_tree called', flush=True)\nos.kill(os.getpid(), 9)\n"
CHAINED = """
def build():
    raise OSError("ninja is missing")
try:
    try:
        build()
    except OSError as error:
        raise RuntimeError("the extension was not loaded") from error
except RuntimeError:
    logging.exception("the scheduler failed")
"""
GROUP = """
async def fail():
    raise ValueError("no such model")
async def main():
    async with asyncio.TaskGroup() as group:
        group.create_task(fail())
try:
    asyncio.run(main())
except BaseException:
    traceback.print_exc()
"""
LOGGED = """
logging.basicConfig(format="%(asctime)s \x1b[31m%(levelname)s\x1b[0m %(message)s", level="INFO")
logging.info("log_level='error'")
logging.warning("no cache: KeyError: 'uid 1000'")
logging.error("port 1 is taken")
logging.error("no port, no server")
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        pytest.param(CHAINED, r"OSError: ninja is missing \(log", id="chained"),
        pytest.param(GROUP, r"ValueError: no such model \(log", id="group"),
        pytest.param(LOGGED, r"[0-9:, -]+ ERROR port 1 is taken \(log", id="logged"),
        pytest.param("print('last words')", r".*kill_process_tree called \(log", id="no error"),
    ],
)
def test_a_process_that_did_not_start_is_explained_by_its_first_error(tmp_path: Path, code: str, reason: str) -> None:
    supervisor = Supervisor(tmp_path)
    code = f"import asyncio, logging, os, traceback\n{code}{NOISE}"
    supervisor.start(ProcessSpec("broken", (sys.executable, "-c", code)))
    wait_for(lambda: supervisor.ended())
    killed = re.escape("exit code -9 (Killed, as the kernel does when memory is short)")
    assert re.match(f"broken ended with {killed}: {reason}", supervisor.ended()["broken"])
    supervisor.stop()


def test_a_process_that_had_served_is_not_explained_by_what_happened_long_before(tmp_path: Path) -> None:
    log = tmp_path / "log"
    served = ["ERROR a client sent nonsense", *(f"INFO round {number} served" for number in range(300))]
    log.write_text("\n".join(served))
    assert reason_of(log) == "INFO round 299 served"
    log.write_text("\n".join([*served, "Traceback (most recent call last):", "  a", "MemoryError", "INFO bye"]))
    assert reason_of(log) == "MemoryError"


def test_a_frontend_that_dynamo_ends_without_a_watch_is_explained_with_the_way_to_more(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ended = "\x1b[31mERROR\x1b[0m dynamo_runtime::component::client: monitor_instance_source: The Sender is dropped: "
    log.write_text(f"ERROR KeyValueStoreManager.watch failed\n{ended}channel closed, endpoint=a/b/c\nbye")
    assert reason_of(log).endswith("sysctl -w fs.inotify.max_user_instances=1024")


def test_a_refused_request_does_not_explain_why_a_frontend_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    refusals = (
        "2026-11-26T10:00:00Z ERROR http-request: http response sent status=400",
        "2026-11-26T10:00:00Z ERROR dynamo_llm::http::service: Streaming error: the predicted wait is 9 s",
    )
    log.write_text("\n".join([*refusals, "bye"]))
    assert reason_of(log) == "bye"
    log.write_text("\n".join([*refusals, "ERROR the runtime is gone", "bye"]))
    assert reason_of(log) == "ERROR the runtime is gone"


@pytest.mark.parametrize(
    ("end", "reason"), [("os.kill(os.getpid(), 9)", "it had no time to log why"), ("os._exit(137)", "OSError")]
)
def test_what_a_process_logged_before_it_was_killed_does_not_explain_its_end(
    tmp_path: Path, end: str, reason: str
) -> None:
    """Unless it has told of a child, or has never served: an engine that cannot start kills itself."""
    supervisor = Supervisor(tmp_path)
    log = "print('Traceback (most recent call last):\\n  a\\nOSError: an old one', flush=True)"
    supervisor.start(ProcessSpec("worker", (sys.executable, "-c", f"import os; {log}; {end}")))
    wait_for(supervisor.ended)
    assert f"): {reason}" in supervisor.ended(has_served=True)["worker"]
    assert "): OSError" in supervisor.ended()["worker"]
    supervisor.stop()


def test_the_line_with_which_our_own_program_ends_explains_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ERROR another\nampd: cannot listen on 127.0.0.1:8000; choose another --http-port\n")
    assert reason_of(log) == "cannot listen on 127.0.0.1:8000; choose another --http-port"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_code_of_a_killed_process_names_the_signal(number: signal.Signals) -> None:
    for code in (-number, 128 + number):
        assert (signal.strsignal(number) or "") in signal_of(code)


@pytest.mark.parametrize("code", [0, 1, 128, 255])
def test_an_ordinary_exit_code_names_no_signal(code: int) -> None:
    assert signal_of(code) == ""
