"""The stages of a GPU day. Each prints its rows as JSON lines, with the card and the versions.

    python -m tools.gpu_day.stages STAGE [--device cpu]

On a CPU the same code runs with few repeats: a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_copies
from workers.kv.ranks.copies import NeighbourStores, PageLoader, RankCopies
from workers.kv.ranks.pools import PoolBuffers, attention_buffers, pool_geometry
from workers.kv.shared import NEIGHBOUR_BYTES, KvGeometry, StoreMemory

PAGE, LAYERS, HEADS, DIM = 16, 8, 8, 128
_PATIENCE_S = 20.0
GPU_TESTS = ("tests/workers/kv/ranks/test_on_gpu.py", "tests/workers/kv/ranks/test_copies.py")
ROOT = Path(__file__).parents[2]

Row = dict[str, Any]


def rehearse() -> None:
    """Let the code for a GPU run on the CPU, where each operation has ended when the call that begins it returns."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: 0
    cuda.set_device = lambda _device: None
    cuda.cudart = lambda: type("Cudart", (), {"cudaHostUnregister": lambda _: 0, "cudaHostRegister": lambda *_: 0})
    cuda._sleep = lambda _cycles: None
    cuda.get_device_name = lambda: "NVIDIA H100 in a rehearsal"
    gpu_copies.DEVICE = "cpu"


class Pool:
    """The KV pool of one rank, and its copies."""

    def __init__(self, store: torch.Tensor, pages: int, device: str) -> None:
        bits = torch.randint(0, 2**15, (LAYERS, 2, (pages + 1) * PAGE, HEADS, DIM), dtype=torch.int16)
        self.memory = bits.to(device).view(torch.bfloat16)
        buffers = attention_buffers(self.memory[:, 0], self.memory[:, 1], PAGE, range(LAYERS))
        self.geometry = geometry(buffers)
        self.copies = RankCopies(self.geometry, {"kv": buffers}, store, tp=1, rank=0, layers=LAYERS)
        self.slots = list(range(1, pages + 1))
        self.offsets = [number * self.geometry.page_bytes for number in range(pages)]

    def pages(self) -> torch.Tensor:
        """What lies in the slots."""
        return self.memory[:, :, PAGE:].view(torch.int16)


def geometry(buffers: PoolBuffers) -> KvGeometry:
    """Of plain attention."""
    return KvGeometry("f", PAGE, (pool_geometry("kv", buffers, {"kv": HEADS}),))


RECORD_BYTES = LAYERS * HEADS * 2 * PAGE * DIM * 2


class Link:
    """The link of a rank: whether a load ended, and its records are free again."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def loaded(self, _rids: list[str], _seconds: float) -> None:
        """The load has landed."""

    def end_load(self, _rid: str) -> None:
        """Nothing is read any more."""
        self.ended.set()


def fence(device: str) -> Iterator[Row]:
    """A load beside a launched step that still writes its slots: with the loader's fence, and without it."""
    pages, repeats = (64, 50) if device == "cuda" else (2, 2)
    cuda = gpu_copies.cuda()
    with gpu_copies.store_of(pages * RECORD_BYTES, pinned=True) as store:
        pool = Pool(store, pages, device)
        pool.copies.write("kv", pool.slots, pool.offsets)
        wanted = pool.pages().clone()
        slots = torch.tensor(pool.slots, device=device)
        forward = cuda.Stream()
        for is_fenced in (True, False):
            wrong = late = failed = 0
            for _ in range(repeats):
                link: Any = Link()
                loader = PageLoader(pool.copies, link, forward if is_fenced else None)
                cuda.synchronize()
                with cuda.stream(forward):
                    torch.cuda._sleep(20_000_000)
                    pool.pages().zero_()
                loader.queue("r", {"kv": (slots, pool.offsets)})
                index = loader.start()
                late += not link.ended.wait(_PATIENCE_S)
                failed += not loader.finish(index)
                loader.close()
                cuda.synchronize()
                wrong += not torch.equal(pool.pages(), wanted)
            yield {
                "what": "loads",
                "is_fenced": is_fenced,
                "loads": repeats,
                "wrong": wrong,
                "failed": failed,
                "late": late,
            }


def tests(device: str) -> Iterator[Row]:
    """The tests that need a GPU."""
    argv = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--import-mode=importlib"]
    # The common settings of the tests, and their conftest, need packages of graphs, which do not travel.
    argv += ["--noconftest", "-o", "addopts=", "-o", "filterwarnings=", *GPU_TESTS]
    if device == "cpu":
        argv.append("--collect-only")
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = said.stdout.splitlines()
    yield {
        "what": "pytest",
        "code": said.returncode,
        "summary": lines[-1] if lines else said.stderr[-500:],
        "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))],
    }


def own(pages: int) -> None:
    """The owner of a store that another process reads: fill it, and keep it until the reader has ended."""
    torch.manual_seed(7)
    memory = StoreMemory.create(pages * RECORD_BYTES)
    pool = Pool(torch.frombuffer(memory.map, dtype=torch.uint8), pages, "cpu")
    pool.copies.write("kv", pool.slots, pool.offsets)
    print(*memory.place_for_neighbours, flush=True)
    sys.stdin.read()


def pinning(device: str) -> Iterator[Row]:
    """Whether a mapping that cannot be written is pinned, how long that takes, and loads from it beside own ones."""
    pages = 4096 if device == "cuda" else 2
    argv = [sys.executable, "-c", f"from tools.gpu_day.stages import own; own({pages})"]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        line = owner.stdout.readline()
        yield from _pinned(tuple(map(int, line.split())), pages, device)


def _pinned(place: Any, pages: int, device: str) -> Iterator[Row]:
    torch.manual_seed(7)
    with gpu_copies.store_of(pages * RECORD_BYTES, pinned=True) as store:
        pool = Pool(store, pages, device)
        wanted = pool.pages().clone()
        neighbours = NeighbourStores(pool.copies, on_gpu=True)
        started_s = time.perf_counter()
        refusal = neighbours.map(1, place)
        seconds = time.perf_counter() - started_s
        yield {"what": "map", "bytes": place[3], "seconds": seconds, "refusal": refusal}
        pool.copies.write("kv", pool.slots, pool.offsets)
        for name, first in (("own", 0), ("neighbour", NEIGHBOUR_BYTES)):
            if first and refusal:
                continue
            pool.pages().zero_()
            load = {"kv": (pool.slots, [first + offset for offset in pool.offsets])}
            seconds = gpu_copies.median_s(partial(pool.copies.load, load))
            is_right = torch.equal(pool.pages(), wanted)
            yield {"what": "load", "from": name, "gb_per_s": place[3] / seconds / 1e9, "is_right": is_right}
        neighbours.unmap(1)


def copies(device: str) -> Iterator[Row]:
    """The link, and the workers' copies in real layouts: `benchmarks.gpu_copies`."""
    if device == "cuda":
        yield from gpu_copies.rows(gpu_copies.arguments_of(["--models", "qwen3-32b", "llama-3.1-8b"]))
    else:
        gpu_copies.LINK_BYTES, gpu_copies.WIDTH, gpu_copies.PRODUCTS = 8 << 20, 16, 2
        yield from gpu_copies.rows(
            gpu_copies.arguments_of(["--models", "qwen3-0.6b", "--tp", "2", "--pages", "16", "--tokens", "64"])
        )


STAGES: dict[str, Callable[[str], Iterator[Row]]] = {
    "fence": fence,
    "tests": tests,
    "pinning": pinning,
    "copies": copies,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        rehearse()
    where = {
        "card": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
    }
    for row in STAGES[arguments.stage](arguments.device):
        print(json.dumps({**row, **where}), flush=True)


if __name__ == "__main__":
    main()
