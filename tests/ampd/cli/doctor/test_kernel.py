"""Memory and limits of machines that are not this one."""

from dataclasses import replace
from pathlib import Path

import pytest

from ampd.cli.doctor.finding import Verdict
from ampd.cli.doctor.kernel import (
    HugePagesReading,
    LimitsReading,
    LoadReading,
    MemoryReading,
    judge_huge_pages,
    judge_limits,
    judge_load,
    judge_memory,
    read_huge_pages,
    read_limits,
    read_load,
    read_memory,
)
from ampd.types import GIB

ROOMY = LimitsReading(
    inotify_instances=1024, inotify_used=20, inotify_watches=65536, open_files=1 << 20, locked_bytes=None
)


@pytest.mark.parametrize(
    ("available_gib", "shm_mib", "gpu_gib", "memory", "shm"),
    [
        (1000, 4096, 320, Verdict.OK, Verdict.OK),
        (1000, 4096, 640, Verdict.SLOW, Verdict.OK),
        (16, 64, 0, Verdict.OK, Verdict.WRONG),
        (0.25, 512, 0, Verdict.WRONG, Verdict.SLOW),
        (16, None, 0, Verdict.OK, Verdict.WRONG),
    ],
)
def test_memory_and_shared_memory(
    available_gib: float, shm_mib: int | None, gpu_gib: int, memory: Verdict, shm: Verdict
) -> None:
    available = int(available_gib * GIB)
    reading = MemoryReading(available, available // 4, None if shm_mib is None else shm_mib << 20)
    found = judge_memory(reading, gpu_gib * GIB)
    assert [finding.verdict for finding in found] == [memory, shm]
    assert all(bool(finding.fix) is (finding.verdict is not Verdict.OK) for finding in found)


@pytest.mark.parametrize(
    ("pool_gib", "transparent", "verdict"),
    [
        (64, "always within_size advise [never] deny force", Verdict.OK),
        (0, "always within_size [advise] never deny force", Verdict.OK),
        (1, "always within_size advise [never] deny force", Verdict.SLOW),
        (0, "always within_size advise never [deny] force", Verdict.SLOW),
        (0, "", Verdict.SLOW),
    ],
)
def test_huge_pages(pool_gib: int, transparent: str, verdict: Verdict) -> None:
    (finding,) = judge_huge_pages(HugePagesReading(pool_gib * GIB, 16 * GIB, transparent))
    assert finding.verdict is verdict


@pytest.mark.parametrize(
    ("limit", "used", "verdict"),
    [(128, 0, Verdict.OK), (128, 40, Verdict.SLOW), (128, 110, Verdict.WRONG), (128, 130, Verdict.WRONG)],
)
def test_inotify_instances(limit: int, used: int, verdict: Verdict) -> None:
    finding = judge_limits(replace(ROOMY, inotify_instances=limit, inotify_used=used), locks_bytes=0)[0]
    assert (finding.check, finding.verdict) == ("inotify", verdict)
    assert ("max_user_instances=1024" in finding.fix) is (verdict is not Verdict.OK)


def test_few_watches_are_wrong() -> None:
    finding = judge_limits(replace(ROOMY, inotify_watches=64), locks_bytes=0)[0]
    assert finding.verdict is Verdict.WRONG
    assert "max_user_watches" in finding.fix


def test_a_kernel_without_these_limits_is_no_fault() -> None:
    reading = LimitsReading(None, 0, None, None, None)
    verdicts = [finding.verdict for finding in judge_limits(reading, locks_bytes=GIB)]
    assert verdicts == [Verdict.SKIPPED, Verdict.OK]


def test_a_small_limit_of_open_files_is_slow() -> None:
    assert judge_limits(replace(ROOMY, open_files=1024), locks_bytes=0)[1].verdict is Verdict.SLOW


@pytest.mark.parametrize(("locks_gib", "verdicts"), [(0, []), (1, []), (64, [Verdict.SLOW])])
def test_memory_that_must_be_locked(locks_gib: int, verdicts: list[Verdict]) -> None:
    found = judge_limits(replace(ROOMY, locked_bytes=8 * GIB), locks_bytes=locks_gib * GIB)
    assert [finding.verdict for finding in found[2:]] == verdicts


@pytest.mark.parametrize(("processes", "verdict"), [(0.3, Verdict.OK), (8.0, Verdict.OK), (9.0, Verdict.SLOW)])
def test_load(processes: float, verdict: Verdict) -> None:
    (finding,) = judge_load(LoadReading(processes, 16))
    assert finding.verdict is verdict


@pytest.mark.parametrize(
    ("limit_cores", "verdict", "words"),
    [
        (None, Verdict.OK, "16 cores"),
        (64.0, Verdict.OK, "16 cores"),
        (6.0, Verdict.OK, "use 6"),
        (0.5, Verdict.SLOW, "use 0.5"),
    ],
)
def test_a_container_may_have_less_than_the_machine(limit_cores: float | None, verdict: Verdict, words: str) -> None:
    (finding,) = judge_load(LoadReading(0.3, 16, limit_cores))
    assert finding.verdict is verdict
    assert finding.found.endswith(words)
    assert ("limits.cpu" in finding.fix) is (verdict is Verdict.SLOW)


@pytest.mark.parametrize(
    ("files", "limit_cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
    ],
)
def test_the_limit_of_a_container_is_read(tmp_path: Path, files: dict[str, str], limit_cores: float | None) -> None:
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert read_load(tmp_path).limit_cores == limit_cores


def test_this_machine_is_read() -> None:
    assert read_memory().available > 0
    assert read_huge_pages().store > 0
    assert read_limits().open_files != 0
