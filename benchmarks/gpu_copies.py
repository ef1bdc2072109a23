"""Copies of KV between a GPU and the worker's store: the rates of the link, and of the workers' own copies.

    python -m benchmarks.gpu_copies [--models qwen3-32b llama-3.1-8b] [--tp 1 2] [--pages 16 64] [--tokens 8192]
        [--output FILE]

`link`: one copy of the whole buffer, pinned and not, and pinned copies of smaller pieces. `load` and `write`: one
rank's part of so many tokens between the store and SGLang's layout on the GPU, through `RankCopies` as a rank runs
them, on a stream of its own. `model_ms` is the time of `PerformanceModel.reload_s`, which assumes the link at 80 % of
its peak. `first_layer_ms`: when a prefill's first layer may begin. `beside`: how much longer matrix products take while
loads run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.this_gpu import DenseModel, preset
from workers.kv.ranks.copies import RankCopies, pin
from workers.kv.ranks.pools import attention_buffers, pool_geometry
from workers.kv.shared import KvGeometry, StoreMemory, head_share

DEVICE = "cuda"
REPEATS = 5
LINK_BYTES = 1 << 30
WIDTH, PRODUCTS = 4096, 300
PIECES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20)


def median_s(run: Callable[[], None], repeats: int = REPEATS) -> float:
    """Seconds of a call, with the GPU's work that it began; the first call warms up."""
    seconds = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds[1:])


@contextmanager
def store_of(size_bytes: int, *, pinned: bool) -> Iterator[Any]:
    """A store's memory, touched, as a tensor."""
    memory = StoreMemory.create(size_bytes)
    store = torch.frombuffer(memory.map, dtype=torch.uint8)
    store.zero_()
    if pinned and (refused := pin(store)):
        raise SystemExit(refused[0])
    try:
        yield store
    finally:
        torch.cuda.synchronize()
        if pinned:
            torch.cuda.cudart().cudaHostUnregister(store.data_ptr())
        del store
        memory.close()


def link_rates() -> Iterator[dict[str, Any]]:
    """Rates of plain copies."""
    on_gpu = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=DEVICE)
    for pinned in (True, False):
        with store_of(LINK_BYTES, pinned=pinned) as store:
            for piece in (*PIECES, LINK_BYTES) if pinned else (LINK_BYTES,):
                # Small pieces would take seconds, at no gain of precision.
                total = min(LINK_BYTES, 4096 * piece)
                pairs = [(on_gpu[at : at + piece], store[at : at + piece]) for at in range(0, total, piece)]
                for direction in ("to GPU", "to store"):

                    def run(pairs: Any = pairs, to_gpu: bool = direction == "to GPU") -> None:
                        for gpu, host in pairs:
                            if to_gpu:
                                gpu.copy_(host, non_blocking=True)
                            else:
                                host.copy_(gpu, non_blocking=True)

                    yield {
                        "what": "link",
                        "pinned": pinned,
                        "piece_bytes": piece,
                        "direction": direction,
                        "gb_per_s": total / median_s(run) / 1e9,
                    }
                del pairs


def rank_copies(dense: DenseModel, tp: int, page: int, pages: int, store: Any) -> tuple[RankCopies, int]:
    """The copies of rank 0 with pools of so many pages, and the bytes of a record."""
    share = head_share(dense.kv_heads, tp, 0)
    pool = torch.zeros(
        (dense.layers, 2, (pages + 1) * page, share.count, dense.head_dim), dtype=torch.bfloat16, device=DEVICE
    )
    buffers = attention_buffers(pool[:, 0], pool[:, 1], page, range(dense.layers))
    geometry = KvGeometry("f", page, (pool_geometry("kv", buffers, {"kv": dense.kv_heads}),))
    copies = RankCopies(geometry, {"kv": buffers}, store, tp=tp, rank=0, layers=dense.layers)
    return copies, geometry.pools[0].record_bytes


def kv_rates(dense: DenseModel, tp: int, page: int, tokens: int, *, pinned: bool = True) -> Iterator[dict[str, Any]]:
    """One rank's load and write of `tokens` in neighbouring records, and of records in any order."""
    pages = tokens // page
    with store_of(round(dense.shape.kv_bytes_per_token) * tokens, pinned=pinned) as store:
        copies, record_bytes = rank_copies(dense, tp, page, pages, store)
        slots, offsets = list(range(pages)), [number * record_bytes for number in range(pages)]
        stream = torch.cuda.Stream()
        first_s: list[float] = []

        def load() -> None:
            started_s = time.perf_counter()
            with torch.cuda.stream(stream):
                for layer in copies.load({"kv": (slots, offsets)}):
                    stream.synchronize()
                    if not layer:
                        first_s.append(time.perf_counter() - started_s)

        def write() -> None:
            with torch.cuda.stream(stream):
                copies.write("kv", slots, offsets)
            stream.synchronize()

        moved_bytes = tokens * dense.shape.kv_bytes_per_token / dense.shape.kv_shards(tp)
        model_s = moved_bytes / preset().host_bytes_per_s / 0.8
        for name, run in (("load", load), ("write", write)):
            seconds = median_s(run)
            row = {
                "what": name,
                "pinned": pinned,
                "model": dense.shape.name,
                "tp": tp,
                "page_tokens": page,
                "tokens": tokens,
                "ms": seconds * 1e3,
                "gb_per_s": moved_bytes / seconds / 1e9,
            }
            if name == "load":
                row |= {"model_ms": model_s * 1e3, "first_layer_ms": statistics.median(first_s[1:]) * 1e3}
            yield row
        if pinned:
            yield {"what": "beside", "model": dense.shape.name, "tp": tp, "page_tokens": page, **beside(load, write)}


def beside(load: Callable[[], None], write: Callable[[], None]) -> dict[str, float]:
    """How much longer the same matrix products take while another thread copies."""
    a, b = (torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))

    def compute_s() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(PRODUCTS):
            torch.mm(a, b)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    compute_s()
    alone_s = compute_s()
    ratios = {}
    for name, run in (("load", load), ("write", write)):
        ended = threading.Event()

        def copy_on(run: Callable[[], None] = run, ended: threading.Event = ended) -> None:
            while not ended.is_set():
                run()

        thread = threading.Thread(target=copy_on)
        thread.start()
        time.sleep(0.05)
        ratios[f"{name}_ratio"] = statistics.median(compute_s() for _ in range(3)) / alone_s
        ended.set()
        thread.join()
    return ratios


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    yield from link_rates()
    for name in arguments.models:
        dense = DenseModel.of(name)
        for tp in arguments.tp:
            for page in arguments.pages:
                yield from kv_rates(dense, tp, page, arguments.tokens)
    yield from kv_rates(DenseModel.of(arguments.models[0]), 1, arguments.pages[0], arguments.tokens, pinned=False)


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b", "qwen3-32b"])
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--pages", nargs="+", type=int, default=[16, 64], help="tokens per page")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--output", type=Path, help="append each row to this file as JSON, as it comes")
    return parser.parse_args(argv)


def main() -> None:
    arguments = arguments_of()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for row in rows(arguments):
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            ),
            flush=True,
        )
        if arguments.output:
            with arguments.output.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
