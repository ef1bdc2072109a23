"""What checksums of pages cost, by the size of a page: seconds of CPU per GiB, as a table for docs/security.md.

python -m benchmarks.checksum_cost [--mib 256] [--repeats 7]
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from workers.kv.engine_store import checksum_of

PAGE_BYTES = (4 << 10, 32 << 10, 256 << 10, 4 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="memory that is summed up, in MiB")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    words = np.random.default_rng(0).integers(0, 2**62, options.mib << 17, dtype=np.int64)
    for page_bytes in PAGE_BYTES:
        costs = [cost_s_per_gib(work, words.nbytes, options.repeats) for work in ways(words, page_bytes).values()]
        print(f"| {page_bytes >> 10} KiB | {' | '.join(f'{cost:.3f}' for cost in costs)} |")


def ways(words: Any, page_bytes: int) -> Mapping[str, Callable[[], object]]:
    """Each way to go over all pages, by name, in the order of the table."""
    memory = memoryview(words).cast("B")
    pages = [memory[at : at + page_bytes] for at in range(0, words.nbytes, page_bytes)]
    rows, copied = words.reshape(len(pages), -1), np.empty_like(words)
    return {
        "XXH3": lambda: [checksum_of(page) for page in pages],
        "CRC-32": lambda: [zlib.crc32(page) for page in pages],
        "Adler-32": lambda: [zlib.adler32(page) for page in pages],
        "sum": lambda: rows.sum(1),
        "copy": lambda: np.copyto(copied, words),
    }


def cost_s_per_gib(work: Callable[[], object], size_bytes: int, repeats: int) -> float:
    """Median CPU time of one run, per GiB."""
    found = []
    for _ in range(repeats):
        start_s = time.process_time()
        work()
        found.append(time.process_time() - start_s)
    return statistics.median(found) * (1 << 30) / size_bytes


if __name__ == "__main__":
    main()
