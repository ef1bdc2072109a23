"""Log lines as text and as JSON, with the ids of the round that they belong to."""

import json
import logging
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.telemetry import logs
from ampd.telemetry.logs import (
    DynamoHandler,
    JsonFormatter,
    JsonHandler,
    RoundLog,
    StderrLines,
    TextFormatter,
    log_fields,
    parse_directives,
)
from ampd.telemetry.tracing import Trace

LOG = logging.getLogger("tests.logs")


def record(message: str = "said", *args: Any, level: int = logging.INFO, name: str = "a.b", **fields: Any) -> Any:
    made = logging.LogRecord(name, level, "file.py", 7, message, args, None)
    setattr(made, logs._FIELDS, fields)
    return made


def test_text_has_fields_and_ids_after_the_message() -> None:
    Trace("r", trace_id="t", session_id="two words").enter()
    line = TextFormatter().format(record("hello %s", "you", route="remote", seconds=0.123456789, all=[1, 2.5]))
    assert line == 'hello you route=remote seconds=0.123457 all=[1,2.5] trace_id=t request_id=r session_id="two words"'


def test_text_outside_of_a_round_is_the_message() -> None:
    assert TextFormatter().format(record("50% of it")) == "50% of it"


def test_json_has_the_keys_of_dynamo_s_lines() -> None:
    Trace("r", trace_id="t", x_request_id="x", session_id="s").enter()
    line = json.loads(
        JsonFormatter().format(record("hello %s", "you", level=logging.WARNING, route="remote", tokens=5))
    )
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "WARN",
        "file": "file.py",
        "line": 7,
        "target": "a.b",
        "message": "hello you",
        "route": "remote",
        "tokens": 5,
        "trace_id": "t",
        "request_id": "r",
        "x_request_id": "x",
        "session_id": "s",
    }


def test_ids_cannot_be_written_over_by_fields() -> None:
    Trace("r").enter()
    assert json.loads(JsonFormatter().format(record(request_id="other")))["request_id"] == "r"


def test_a_traceback_stays_within_its_line() -> None:
    made = record()
    try:
        raise ValueError("two\nlines")
    except ValueError:
        made.exc_info = sys.exc_info()
    assert "two\nlines" in json.loads(JsonFormatter().format(made))["exception"]
    Trace("r").enter()
    first, *rest = TextFormatter().format(made).splitlines()
    assert first == "said request_id=r"
    assert "Traceback" in rest[0]


@pytest.mark.slow
@given(message=st.text(), value=st.recursive(st.text() | st.floats() | st.none(), st.lists), session_id=st.text())
def test_whatever_is_said_is_one_line_of_json_and_fields_are_one_line_of_text(
    message: str, value: Any, session_id: str
) -> None:
    trace = Trace("r", session_id=session_id)
    trace.enter()
    made = record("%s", message, value=value)
    line = JsonFormatter().format(made).encode("utf-8", "backslashreplace").decode()
    assert len(line.split("\n")) == 1
    assert json.loads(line, parse_constant=pytest.fail)["request_id"] == "r"
    text = TextFormatter().format(record("said", value=value))
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_lacks_are_words(value: float) -> None:
    assert json.loads(JsonFormatter().format(record(value=value)))["value"] == str(value)


@pytest.mark.parametrize(
    ("text", "level", "targets"),
    [
        ("", logging.INFO, {}),
        ("warn", logging.WARNING, {}),
        ("info,router=debug", logging.INFO, {"router": logging.DEBUG}),
        (" error , a.b = trace,nonsense=x,y", logging.ERROR, {"a.b": logging.DEBUG}),
    ],
)
def test_directives_of_dyn_log(text: str, level: int, targets: dict[str, int]) -> None:
    assert parse_directives(text) == (level, targets)


def test_the_longest_target_that_fits_decides() -> None:
    handler = JsonHandler("warn,router=debug,router.round_run=error")
    wanted = [
        name
        for name, level in [
            ("workers", logging.INFO),
            ("workers", logging.WARNING),
            ("router.calls", logging.DEBUG),
            ("router.round_run", logging.WARNING),
            ("router.round_run", logging.ERROR),
        ]
        if handler.filter(record(name=name, level=level))
    ]
    assert wanted == ["workers", "router.calls", "router.round_run"]


def test_json_lines_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    handler = JsonHandler("info")
    handler.handle(record("\udc80 half a character"))
    handler.handle(record("debug", level=logging.DEBUG))
    out, err = capfd.readouterr()
    assert out == ""
    assert [json.loads(line)["message"] for line in err.splitlines()] == ["\udc80 half a character"]


def test_lines_reach_dynamo_by_their_logger_s_name() -> None:
    given: list[tuple[Any, ...]] = []
    DynamoHandler(lambda *args: given.append(args)).handle(record(level=logging.WARNING, route="local"))
    assert given == [("warning", "said route=local", "a.b", "file.py", 7)]


def test_a_line_leaves_out_unknown_fields_and_is_left_out_below_the_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOG.name)
    log_fields(LOG, logging.DEBUG, "not wanted")
    log_fields(LOG, logging.INFO, "said", unknown=None, known=0)
    (made,) = caplog.records
    assert getattr(made, logs._FIELDS) == {"known": 0}
    assert made.filename == "test_logs.py"


@pytest.mark.parametrize(
    ("wanted", "end", "step"),
    [
        ("none", logging.DEBUG, logging.DEBUG),
        ("end", logging.INFO, logging.DEBUG),
        ("steps", logging.INFO, logging.INFO),
    ],
)
def test_levels_of_a_round_s_lines(wanted: str, end: int, step: int) -> None:
    assert (RoundLog(wanted).end_level, RoundLog(wanted).step_level) == (end, step)


def test_what_is_printed_to_standard_error_becomes_lines_of_json(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", StderrLines(JsonHandler("").handle, 2))
    print("one\n\ntwo", file=sys.stderr)
    for piece in ("thr", "ee", "\nbeg"):
        sys.stderr.write(piece)
    assert [json.loads(line)["message"] for line in capfd.readouterr().err.splitlines()] == ["one", "two", "three"]
    thread = threading.Thread(target=print, args=("of another thread",), kwargs={"file": sys.stderr})
    thread.start()
    thread.join()
    sys.stderr.write("un")
    sys.stderr.flush()
    said = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["message"] for line in said] == ["of another thread", "begun"]
    assert {(line["target"], line["level"]) for line in said} == {("stderr", "WARN")}


CONFIGURED = """
import os, signal, subprocess, sys
from ampd.telemetry.logs import SGLANG_CONFIG, configure_logging
configure_logging()
subprocess.run([sys.executable, "-c", "import os; print(open(os.environ['" + SGLANG_CONFIG + "']).read())"], check=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_processes_of_an_engine_find_its_logging_configuration_and_no_file_is_left(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CONFIGURED], env=environment, stdout=subprocess.PIPE, check=False)
    assert json.loads(done.stdout)["handlers"]["dynamo"]["class"] == "dynamo.runtime.logging.LogHandler"
    assert list(tmp_path.iterdir()) == []
