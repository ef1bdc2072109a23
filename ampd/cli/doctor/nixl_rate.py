"""Times NIXL between two processes of this machine, and a plain copy of as many bytes. `transport.py` runs it.

    python -m ampd.cli.doctor.nixl_rate          prints one JSON object
    python -m ampd.cli.doctor.nixl_rate source   the process that is read from; it ends with its standard input

It is a process of its own, because NIXL and UCX read their variables once, and a failure may end the process.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np

from ampd.child_process import tied_to_parent
from ampd.cli.doctor.raw_read import BLOCK_BYTES, RawTransport
from workers.kv.peer_reads import Remote
from workers.kv.store_memory import StoreMemory

SIZE_BYTES = 64 * BLOCK_BYTES
_REPEATS = 9
_LEASE_S = 120.0


def main() -> None:
    if sys.argv[1:] == ["source"]:
        _serve()
    else:
        print(json.dumps(_measured()))


def _serve() -> None:
    memory, values = _filled()
    transport = RawTransport(memory.address, SIZE_BYTES)
    transport.let_read(time.monotonic() + _LEASE_S)
    place = {"agent": base64.b64encode(transport.metadata).decode(), "address": memory.address}
    print(json.dumps({**place, "check": int(values[-1])}), flush=True)
    sys.stdin.read()
    transport.close()


def _filled() -> tuple[StoreMemory, np.ndarray[Any, np.dtype[np.uint64]]]:
    memory = StoreMemory.create(SIZE_BYTES)
    values = np.frombuffer(memory.map, dtype=np.uint64)
    values[:] = np.arange(len(values), dtype=np.uint64)
    return memory, values


def _measured() -> dict[str, Any]:
    """GB/s of a read of 64 blocks of 1 MB and of a plain copy, and seconds of a read of one block.

    The fastest of nine counts, because that is what the hardware can do.
    """
    memory, values = _filled()
    copy_s = _copy_s(values)
    values[:] = 0
    argv = [sys.executable, "-m", "ampd.cli.doctor.nixl_rate", "source"]
    with subprocess.Popen(tied_to_parent(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as source:
        assert source.stdin is not None
        assert source.stdout is not None
        place = json.loads(source.stdout.readline())
        transport = RawTransport(memory.address, SIZE_BYTES)
        remote = Remote("source", base64.b64decode(place["agent"]), place["address"])
        read_s = [transport.raw(remote, SIZE_BYTES) for _ in range(_REPEATS + 1)][1:]  # the first one connects
        block_s = [transport.raw(remote, BLOCK_BYTES) for _ in range(_REPEATS)]
        is_right = int(values[-1]) == place["check"]
        transport.close()
        source.stdin.close()
    return {
        "gb_per_s": SIZE_BYTES / min(read_s) / 1e9,
        "copy_gb_per_s": SIZE_BYTES / copy_s / 1e9,
        "block_s": min(block_s),
        "is_right": is_right,
    }


def _copy_s(values: np.ndarray[Any, np.dtype[np.uint64]]) -> float:
    target, seconds = np.zeros_like(values), []
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        np.copyto(target, values)
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


if __name__ == "__main__":
    main()
