"""The store's memory: shared by processes, sparse, and sized after the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.kv.shared import (
    MINIMUM_BYTES,
    StoreMemory,
    available_bytes,
    default_size_bytes,
)

MIB = 1 << 20
MEMINFO = """MemTotal:       65536000 kB
MemAvailable:    4194304 kB
"""


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_another_process_maps_the_same_bytes() -> None:
    memory = StoreMemory.create(64 * MIB)
    memory.map[5:8] = b"abc"
    process_id, fd, size_bytes = memory.place
    code = f"""
from workers.kv.shared import StoreMemory
memory = StoreMemory.open({process_id}, {fd}, {size_bytes})
assert memory.map[5:8] == b"abc"
memory.map[-3:] = b"xyz"
memory.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert memory.map[-3:] == b"xyz"
    memory.close()


def test_memory_that_was_never_written_takes_none() -> None:
    memory = StoreMemory.create(64 * MIB)
    memory.map[0] = 1
    _, fd, _ = memory.place
    assert os.fstat(fd).st_blocks * 512 <= 4 * MIB
    memory.close()


def test_views_keep_the_mapping_alive() -> None:
    memory = StoreMemory.create(MIB)
    view = memoryview(memory.map)
    memory.close()
    view[0] = 7
    assert view[0] == 7


def test_a_store_that_does_not_fit_is_one_clear_line() -> None:
    with pytest.raises(OSError, match=r"a KV store of 1048576\.0 GiB does not fit: .* GiB of memory are available"):
        StoreMemory.create(1 << 50)


def test_memory_of_a_process_that_has_ended() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(OSError, match="No such file"):
        StoreMemory.open(gone.pid, 3, MIB)


@pytest.mark.parametrize(
    ("files", "available_mib"),
    [
        pytest.param({}, 4096, id="no cgroup"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pod/worker\n",
                "sys/fs/cgroup/pod/worker/memory.max": "max\n",
                "sys/fs/cgroup/pod/memory.max": f"{2048 * MIB}\n",
                "sys/fs/cgroup/pod/memory.current": f"{1000 * MIB}\n",
                "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {100 * MIB}\n",
            },
            1148,
            id="version 2, limited above",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/not/visible/here\n",
                "sys/fs/cgroup/memory.max": f"{1024 * MIB}\n",
                "sys/fs/cgroup/memory.current": "0\n",
            },
            1024,
            id="version 2, in a container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/x\n0::/\n",
                "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{3000 * MIB}\n",
                "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": f"{500 * MIB}\n",
                "sys/fs/cgroup/memory/docker/x/memory.stat": f"inactive_file 1\ntotal_inactive_file {20 * MIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            },
            2520,
            id="version 1",
        ),
    ],
)
def test_the_least_of_kernel_and_cgroups_is_available(
    tmp_path: Path, files: dict[str, str], available_mib: int
) -> None:
    root = machine(tmp_path, files)
    assert available_bytes(root) == available_mib * MIB
    assert default_size_bytes(2, root) == max(MINIMUM_BYTES, available_mib * MIB // 4)
    assert default_size_bytes(1000, root) == MINIMUM_BYTES


def test_this_machine_has_some_memory() -> None:
    assert 0 < available_bytes() < 1 << 50
