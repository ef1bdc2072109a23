"""Errors that a user can cause: one line that says what is wrong, where, and how to fix it."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches

_CREDENTIALS = re.compile(r"://(?!USER:PASSWORD@)\S*@")
"""User and password of a URL, which a misspelled flag would show. The example of our own messages stays readable."""

_OWN_PACKAGES = ("ampd", "benchmarks", "planner", "router", "tools", "workers", "workloads")
"""If one of them cannot be imported, that is a fault of the code and not of the installation."""

_DYNAMOS_INSTALL = "serving needs Dynamo: uv pip install --editable '.[serve]' in AMPD's repository"

_LONGEST_PART = 1000
"""Characters of the beginning and of the end of a message that are shown. A message may quote what was given."""


class UserError(Exception):
    """The call or the input is wrong; commands print the message as one line and exit with 2."""


class RunError(Exception):
    """A command ran and failed for a reason worth one line; commands exit with 1."""


def guarded(body: Callable[[], int]) -> int:
    """Run a command's body and turn its errors into one line and an exit code."""
    try:
        return body()
    except UserError as error:
        print(_with_program(error), file=sys.stderr)
        return 2
    except RunError as error:
        print(_with_program(error), file=sys.stderr)
        return 1
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OWN_PACKAGES:
            raise
        fix = _DYNAMOS_INSTALL if package == "dynamo" else "install AMPD in a new environment"
        text = f"a package is missing or broken: {one_line_of(_first_cause(error))}; {fix}"
        print(f"ampd: {text}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"ampd: {str(error.filename)[:60]}...: no file can have such a long name", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of a line about an unknown name: the known one that it is most like, if there is such a one."""
    names = {name.lower(): name for name in known}
    found = get_close_matches(given.lower(), names, 1)
    return f"; did you mean {names[found[0]]!r}?" if found else ""


def without_credentials(text: str) -> str:
    """The text without user and password of the URLs in it."""
    return _CREDENTIALS.sub("://...@", text)


def one_line_of(error: BaseException) -> str:
    """The message of an error as one line, or its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def _first_cause(error: BaseException) -> BaseException:
    """What an error was raised from, at the beginning: the loader's message, and not a package's advice about it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _with_program(error: Exception) -> str:
    text = without_credentials(one_line_of(error))
    if len(text) > 2 * _LONGEST_PART:
        text = f"{text[:_LONGEST_PART]} ... {text[-_LONGEST_PART:]}"
    return text if text.startswith("ampd") else f"ampd: {text}"
