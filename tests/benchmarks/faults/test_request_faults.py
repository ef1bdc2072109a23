"""Faults that clients cause: how a failure that no status shows is found."""

from __future__ import annotations

import ast
from pathlib import Path

import router.coordinator
from benchmarks.faults.request_faults import COORDINATOR_FAILED, unexpected_failures


def test_an_exception_in_a_coordinator_is_a_complaint() -> None:
    lines = [{"message": "round refused"}, {"message": COORDINATOR_FAILED, "level": "ERROR"}, {"other": 1}]
    assert unexpected_failures("coordinator-1", lines) == [f"coordinator-1: {COORDINATOR_FAILED}"]
    assert unexpected_failures("coordinator-1", lines[:1]) == []


def test_coordinators_log_this_line() -> None:
    tree = ast.parse(Path(router.coordinator.__file__).read_text("utf-8"))
    logged = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert COORDINATOR_FAILED in logged
