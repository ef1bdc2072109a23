"""Copies of KV between a GPU and the worker's store: the rates of the link, and of the workers' own copies.

    python -m benchmarks.gpu_copies [--models qwen3-32b llama-3.1-8b] [--tp 1 2] [--pages 16 64] [--tokens 8192]
        [--output FILE]

`link`: one copy of the whole buffer, pinned and not, and pinned rows as far apart as records are. `load` and `write`:
one rank's part of so many tokens between the store and SGLang's layout on the GPU, through `RankCopies` as a rank runs
them. `of_link`: their rate as a share of the largest pinned copy's. `calls`: copies and kernels. `enqueue_ms`: for how
long the thread of the engine is busy with a load. `first_layer_ms`: when a prefill's first layer may begin. `model_ms`:
`PerformanceModel.reload_s`, which assumes the link at 80 % of its peak. `beside`: how much longer a step of matrix
products takes where a load is started before it, and where a thread writes meanwhile.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.this_gpu import DenseModel, preset
from workers.kv.ranks import copies as engine
from workers.kv.ranks.copies import RankCopies, copy_rows, pin
from workers.kv.ranks.pools import attention_buffers, pool_geometry
from workers.kv.shared import KvGeometry, StoreMemory, head_share

DEVICE = "cuda"
REPEATS = 5
LINK_BYTES = 1 << 30
WIDTH, PRODUCTS = 4096, 300
ROWS = (8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 2 << 20)
DISTANCE = 4 << 20
"""Of two rows, as of two records of Qwen3-32B."""


def cuda() -> Any:
    """Torch's module for the device."""
    return torch.get_device_module(DEVICE)


def median_s(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of a call, with the GPU's work that it began; the first call warms up."""
    seconds = []
    for _ in range(repeats + 1):
        cuda().synchronize()
        started_s = time.perf_counter()
        run()
        cuda().synchronize()
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
        cuda().synchronize()
        if pinned:
            torch.cuda.cudart().cudaHostUnregister(store.data_ptr())
        del store
        memory.close()


def link_rates() -> Iterator[dict[str, Any]]:
    """Rates of plain copies: of everything at once, and of rows."""
    on_gpu = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=DEVICE)
    for pinned in (True, False):
        with store_of(LINK_BYTES, pinned=pinned) as store:
            for row in (LINK_BYTES, *ROWS) if pinned else (LINK_BYTES,):
                # One after the other the rows of all columns take the whole buffer.
                distance = min(DISTANCE, LINK_BYTES)
                shape = (1, LINK_BYTES) if row == LINK_BYTES else (LINK_BYTES // distance, min(row, distance))
                columns = range(0, LINK_BYTES if row == LINK_BYTES else distance, shape[1])
                gpu = [on_gpu.as_strided(shape, (shape[1], 1), at * shape[0]) for at in columns]
                host = [store.as_strided(shape, (distance, 1), at) for at in columns]
                for direction, pairs in (
                    ("to GPU", list(zip(gpu, host, strict=True))),
                    ("to store", list(zip(host, gpu, strict=True))),
                ):

                    def run(pairs: Any = pairs) -> None:
                        for into, source in pairs:
                            copy_rows(into, source)

                    rate = len(pairs) * shape[0] * shape[1] / median_s(run) / 1e9
                    yield {"what": "link", "pinned": pinned, "row_bytes": row, "direction": direction, "gb_per_s": rate}
                del gpu, host, pairs


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


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """The copies and kernels that are begun meanwhile."""
    calls, move, copy = [0], engine.Step.move, engine.copy_rows

    def counted(act: Callable[..., None], *args: Any, **more: Any) -> None:
        calls[0] += 1
        act(*args, **more)

    patched: Any = engine
    patched.Step.move = lambda *args, **more: counted(move, *args, **more)
    patched.copy_rows = partial(counted, copy)
    try:
        yield calls
    finally:
        patched.Step.move, patched.copy_rows = move, copy


def kv_rates(
    dense: DenseModel, tp: int, page: int, tokens: int, link: dict[str, float], *, pinned: bool = True
) -> Iterator[dict[str, Any]]:
    """One rank's load and write of `tokens` in neighbouring records, and of records in any order."""
    pages = tokens // page
    with store_of(round(dense.shape.kv_bytes_per_token) * tokens, pinned=pinned) as store:
        copies, record_bytes = rank_copies(dense, tp, page, pages, store)
        in_order = [number * record_bytes for number in range(pages)]
        slots = torch.arange(pages, device=DEVICE)
        moved_bytes = tokens * dense.shape.kv_bytes_per_token / dense.shape.kv_shards(tp)
        model_s = moved_bytes / preset().host_bytes_per_s / 0.8
        common = {"pinned": pinned, "model": dense.shape.name, "tp": tp, "page_tokens": page, "tokens": tokens}
        for order, offsets in (("neighbours", in_order), ("any", random.Random(1).sample(in_order, pages))):
            times: list[tuple[float, float]] = []

            def load(offsets: Sequence[int] = offsets, times: Any = times) -> None:
                started_s = time.perf_counter()
                landed = copies.load({"kv": (slots, offsets)})
                enqueued_s = time.perf_counter() - started_s
                landed[0].synchronize()
                times.append((enqueued_s, time.perf_counter() - started_s))

            write = partial(copies.write, "kv", range(pages), offsets)
            for name, run, direction in (("load", load, "to GPU"), ("write", write, "to store")):
                with counted_calls() as calls:
                    run()
                    cuda().synchronize()
                seconds = median_s(run)
                rate = moved_bytes / seconds / 1e9
                row = {"what": name, "order": order, **common, "ms": seconds * 1e3, "gb_per_s": rate, "calls": calls[0]}
                row["of_link"] = rate / link[direction]
                if name == "load":
                    enqueue_s, first_s = (statistics.median(column) for column in zip(*times[1:], strict=True))
                    row |= {"model_ms": model_s * 1e3, "first_layer_ms": first_s * 1e3, "enqueue_ms": enqueue_s * 1e3}
                yield row
        if pinned:
            begin = partial(copies.load, {"kv": (slots, in_order)})
            write = partial(copies.write, "kv", range(pages), in_order)
            yield {"what": "beside", "model": dense.shape.name, "tp": tp, "page_tokens": page, **beside(begin, write)}


def beside(begin_load: Callable[[], Any], write: Callable[[], None]) -> dict[str, float]:
    """How much longer a step takes with a load that is started before it, and while another thread writes."""
    a, b = (torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))

    def step_s(begin: Callable[[], Any] = lambda: None) -> float:
        cuda().synchronize()
        started_s = time.perf_counter()
        begin()
        for _ in range(PRODUCTS):
            torch.mm(a, b)
        ended = cuda().Event()
        ended.record()
        ended.synchronize()
        return time.perf_counter() - started_s

    step_s()
    alone_s = statistics.median(step_s() for _ in range(REPEATS))
    with_load_s = statistics.median(step_s(begin_load) for _ in range(REPEATS))
    over = threading.Event()

    def keep_writing() -> None:
        while not over.is_set():
            write()

    thread = threading.Thread(target=keep_writing)
    thread.start()
    with_write_s = statistics.median(step_s() for _ in range(REPEATS))
    over.set()
    thread.join()
    return {"step_ms": alone_s * 1e3, "load_ratio": with_load_s / alone_s, "write_ratio": with_write_s / alone_s}


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    link: dict[str, float] = {}
    for row in link_rates():
        link.setdefault(row["direction"], row["gb_per_s"])  # the first is the largest
        yield row
    for name in arguments.models:
        dense = DenseModel.of(name)
        for tp in arguments.tp:
            for page in arguments.pages:
                yield from kv_rates(dense, tp, page, arguments.tokens, link)
    yield from kv_rates(DenseModel.of(arguments.models[0]), 1, arguments.pages[0], arguments.tokens, link, pinned=False)


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
