"""Log lines with fields and with the ids of their round, as readable text or as one JSON object per line.

Dynamo takes Python's log lines as text only, so with `DYN_LOGGING_JSONL=1` they are written here, in the shape of
Dynamo's own JSON lines and under the same filter (`DYN_LOG`).
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from ampd.telemetry import tracing

# -- Turns text that is printed to stderr into JSON log lines, like the logs around it.
#
# Dynamo prints a traceback for every exception that leaves a handler, also for a refused request.


class StderrLines(io.TextIOBase):
    """Replaces `sys.stderr`: each whole line becomes a WARNING of the logger `stderr`.

    Args:
        write: gets each record. It must not print to `sys.stderr` itself.
        descriptor: the real stderr, for code that writes to `fileno()`.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, write: Callable[[logging.LogRecord], object], descriptor: int) -> None:
        self._write = write
        self._descriptor = descriptor
        # Lines arrive in pieces, from several threads.
        self._partial = threading.local()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        """Log the whole lines of the text. The remainder waits for the next call of this thread."""
        *lines, rest = (getattr(self._partial, "text", "") + text).split("\n")
        self._partial.text = rest
        for line in lines:
            self._log(line)
        return len(text)

    def flush(self) -> None:
        """Log this thread's unfinished line. Text that follows becomes another line."""
        rest, self._partial.text = getattr(self._partial, "text", ""), ""
        self._log(rest)

    def _log(self, line: str) -> None:
        if line.strip():
            self._write(logging.LogRecord("stderr", logging.WARNING, "", 0, line, None, None))


SGLANG_CONFIG = "SGLANG_LOGGING_CONFIG_PATH"
"""Where Dynamo tells SGLang of the logging configuration that it has written to a temporary file."""

_FIELDS = "ampd_fields"
_TRUE = ("1", "true", "on", "yes")
_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_LEVEL_NAMES = {logging.WARNING: "WARN", logging.CRITICAL: "ERROR"}
_QUOTED = frozenset(' "=\\')


class RoundLog(StrEnum):
    """How much is logged about rounds that go well.

    `none`: nothing (everything at DEBUG), `end`: one line of the coordinator, `steps`: every step in every process.
    """

    NONE = "none"
    END = "end"
    STEPS = "steps"

    @property
    def end_level(self) -> int:
        """Level of the coordinator's line at the end of a round."""
        return logging.DEBUG if self is RoundLog.NONE else logging.INFO

    @property
    def step_level(self) -> int:
        """Level of all other lines of a round."""
        return logging.INFO if self is RoundLog.STEPS else logging.DEBUG


def log_fields(log: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Log a line with fields. Fields that are None are left out."""
    if log.isEnabledFor(level):
        known = {name: value for name, value in fields.items() if value is not None}
        log.log(level, message, extra={_FIELDS: known}, stacklevel=2)


def configure_logging() -> None:
    """Set up the logging of this process: Dynamo's, with our lines as described above."""
    from dynamo._core import log_message
    from dynamo.runtime.logging import configure_dynamo_logging

    before = os.environ.get(SGLANG_CONFIG)
    configure_dynamo_logging()
    if (written := os.environ.get(SGLANG_CONFIG)) and written != before:
        os.environ[SGLANG_CONFIG] = _in_memory(Path(written))
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    # Lines reach an OpenTelemetry collector only through Dynamo.
    as_json = _is_true("DYN_LOGGING_JSONL") and not _is_true("OTEL_EXPORT_ENABLED")
    chosen = JsonHandler(os.environ.get("DYN_LOG", "")) if as_json else DynamoHandler(log_message)
    chosen.setLevel(root.level)
    root.addHandler(chosen)
    if _is_true("DYN_LOGGING_JSONL"):
        sys.stderr = StderrLines(JsonHandler("").handle, sys.stderr.fileno())


def _in_memory(path: Path) -> str:
    """Delete a file that would outlive this process; returns a path with its text that ends with the process.

    SGLang reads it in the processes of its engine, which are children of this one, and again where it starts anew.
    """
    text = path.read_bytes()
    path.unlink()
    file = os.memfd_create("sglang-logging")
    os.write(file, text)
    return f"/proc/{os.getpid()}/fd/{file}"


class DynamoHandler(logging.Handler):
    """Passes lines to Dynamo, with the logger's name as target.

    Args:
        write: Dynamo's `log_message(level, message, target, file, line)`.
    """

    def __init__(self, write: Callable[[str, str, str, str, int], None]) -> None:
        super().__init__()
        self._write = write
        self.setFormatter(TextFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            self._write(record.levelname.lower(), text, record.name, record.pathname, record.lineno)
        except Exception:
            self.handleError(record)


class JsonHandler(logging.Handler):
    """Writes lines to stderr, each with one system call because other threads write there too.

    Args:
        directives: `DYN_LOG`; a target is the beginning of a logger's name.
    """

    def __init__(self, directives: str) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self._level, self._targets = parse_directives(directives)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line passes `DYN_LOG`. The longest matching target decides."""
        fitting = [target for target in self._targets if record.name.startswith(target)]
        level = self._targets[max(fitting, key=len)] if fitting else self._level
        return record.levelno >= level and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
            while line:
                line = line[os.write(sys.stderr.fileno(), line) :]
        except Exception:
            self.handleError(record)


class TextFormatter(logging.Formatter):
    """The message, then fields and ids as `name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line (and the traceback, if there is one)."""
        text = super().format(record)
        fields = _fields(record)
        if not fields:
            return text
        first, *rest = text.split("\n", 1)
        return "\n".join([" ".join([first, *(f"{name}={_as_text(value)}" for name, value in fields.items())]), *rest])


class JsonFormatter(logging.Formatter):
    """One JSON object, with the keys of Dynamo's own lines; fields and ids beside them."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, without its end."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "level": _LEVEL_NAMES.get(record.levelno, record.levelname),
            "file": record.pathname,
            "line": record.lineno,
            "target": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(_plain(line), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)


def parse_directives(text: str) -> tuple[int, dict[str, int]]:
    """`DYN_LOG` (`info,router=debug`) as the level of all targets and those of some. Invalid directives are ignored."""
    level, targets = logging.INFO, {}
    for directive in filter(None, (part.strip() for part in text.split(","))):
        target, sign, name = directive.rpartition("=")
        known = _LEVELS.get(name.strip().lower())
        if known is None:
            continue
        if sign:
            targets[target.strip()] = known
        else:
            level = known
    return level, targets


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: Mapping[str, Any] = getattr(record, _FIELDS, {})
    trace = tracing.current()
    return {**fields, **trace.fields()} if trace else dict(fields)


def _plain(value: Any) -> Any:
    """Values that JSON can hold; floats are rounded to six decimals."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _as_text(value: Any) -> str:
    plain = _plain(value)
    if isinstance(plain, str) and plain and plain.isprintable() and not _QUOTED.intersection(plain):
        return plain
    return json.dumps(plain, separators=(",", ":"), default=str)


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() in _TRUE
