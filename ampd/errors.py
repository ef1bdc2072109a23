"""Errors that a user can cause: one line that says what is wrong, where, and how to mend it."""

from __future__ import annotations


class UserError(Exception):
    """The call or the input is wrong; commands print the message as one line and exit with 2."""


class RunError(Exception):
    """A command ran and failed for a reason worth one line; commands exit with 1."""
