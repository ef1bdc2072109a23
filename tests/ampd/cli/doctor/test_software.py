"""Interpreters, packages and compilers of machines that are not this one."""

import pytest

from ampd.cli.doctor.finding import Verdict
from ampd.cli.doctor.software import (
    CompilerReading,
    PythonReading,
    judge_compiler,
    judge_packages,
    judge_python,
    read_compiler,
    read_packages,
    read_python,
)


@pytest.mark.parametrize(
    ("version", "verdict"),
    [((3, 10, 9), Verdict.WRONG), ((3, 11, 0), Verdict.OK), ((3, 13, 7), Verdict.OK), ((3, 14, 0), Verdict.WRONG)],
)
def test_supported_versions_of_python(version: tuple[int, int, int], verdict: Verdict) -> None:
    (finding,) = judge_python(PythonReading(version, "CPython", "x86_64", "glibc-2.41"))
    assert finding.verdict is verdict
    assert bool(finding.fix) is (verdict is Verdict.WRONG)


def test_this_machine_runs_the_tests() -> None:
    assert judge_python(read_python())[0].verdict is Verdict.OK
    assert judge_packages(read_packages(), needs_engines=False)[0].verdict is Verdict.OK
    assert judge_compiler(read_compiler(), has_gpu=False)[0].verdict is Verdict.OK


def test_engines_need_their_packages() -> None:
    versions = {"ampd": "0.1.0", "ai-dynamo": "1.6.1", "sglang": None, "nixl": "1.5.1", "torch": "2.14.1"}
    (finding,) = judge_packages(versions, needs_engines=True)
    assert finding.verdict is Verdict.WRONG
    assert "not installed: sglang" in finding.found
    assert judge_packages(versions, needs_engines=False)[0].verdict is Verdict.OK
    (finding,) = judge_packages({**versions, "ai-dynamo": None}, needs_engines=False)
    assert (finding.verdict, ".[serve]" in finding.fix) == (Verdict.WRONG, True)


@pytest.mark.parametrize(
    ("reading", "has_gpu", "verdict"),
    [
        (CompilerReading("/usr/bin/g++", "/usr/bin/nvcc", has_python_headers=True), True, Verdict.OK),
        (CompilerReading("/usr/bin/g++", None, has_python_headers=True), True, Verdict.SLOW),
        (CompilerReading(None, "/usr/bin/nvcc", has_python_headers=True), True, Verdict.WRONG),
        (CompilerReading("/usr/bin/g++", None, has_python_headers=False), True, Verdict.WRONG),
        (CompilerReading(None, None, has_python_headers=False), False, Verdict.OK),
    ],
)
def test_a_gpu_needs_compilers(reading: CompilerReading, has_gpu: bool, verdict: Verdict) -> None:
    (finding,) = judge_compiler(reading, has_gpu=has_gpu)
    assert finding.verdict is verdict
    assert bool(finding.fix) is (verdict is not Verdict.OK)
