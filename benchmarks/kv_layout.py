"""Copies between a device pool and the KV store on one core, in the store's layout and in the other candidate.

    python benchmarks/kv_layout.py [--json] [--pages 40] [--layers 64] [--kv-heads 8] [--head-dim 128] [--repeats 5]

`head-major` is the layout of `workers.kv.shared`: a head's layers follow each other, whatever the TP of the writer.
`as written` keeps each page as the writing rank has it, [layer][K, V][token][head][dim], and a loading rank takes its
heads out of it. All ranks run one after the other; the rate counts the bytes of all heads once. Pages of the pool are
neighbours, or each lies alone. Rates are GB per second of CPU time, best of the repeats, because the wall clock of a
busy machine counts what others do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from workers.kv.ranks.copies import RankCopies
from workers.kv.ranks.pools import attention_buffers, pool_geometry
from workers.kv.shared import KvGeometry

PAGE = 16
TPS = (1, 4)
PAIRS = ((1, 1), (4, 4), (1, 4), (4, 1))
"""TP of the writer and of the loader."""


class Model:
    """The device pools of all ranks at each TP, and a store."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.pages, self.layers = arguments.pages, arguments.layers
        self.heads, self.dim = arguments.kv_heads, arguments.head_dim
        self.page_bytes = 2 * PAGE * self.layers * self.heads * self.dim * 2
        self.store = torch.ones(self.pages * self.page_bytes, dtype=torch.uint8)
        self.pools = {tp: [self._pool(self.heads // tp) for _ in range(tp)] for tp in TPS}

    def _pool(self, heads: int) -> tuple[list[Any], list[Any]]:
        shape = (2 * self.pages * PAGE, heads, self.dim)
        keys, values = ([torch.ones(shape, dtype=torch.bfloat16) for _ in range(self.layers)] for _ in range(2))
        return keys, values

    def slots(self, alone: bool) -> list[int]:
        """Pages of the pool."""
        return [(1 + alone) * page for page in range(self.pages)]


def head_major(model: Model, tp: int) -> list[RankCopies]:
    """The product's copies of each rank."""
    ranks = [{"kv": attention_buffers(*pool, PAGE, range(model.layers))} for pool in model.pools[tp]]
    section = pool_geometry("kv", ranks[0]["kv"], {"kv": model.heads})
    geometry = KvGeometry("", PAGE, (section,))
    return [
        RankCopies(geometry, buffers, model.store, tp=tp, rank=rank, layers=model.layers)
        for rank, buffers in enumerate(ranks)
    ]


class AsWritten:
    """The other candidate: pages as the ranks of `writer` have them, copied by the ranks of `loader`."""

    def __init__(self, model: Model, writer: int, loader: int) -> None:
        per_writer, per_loader = model.heads // writer, model.heads // loader
        # Items are a head's vector of one token, as in the product's copies.
        item = f"V{2 * model.dim}"
        shape = (model.pages, writer, model.layers, 2, PAGE, per_writer)
        store = model.store.numpy().view(item).reshape(shape)
        self.pairs: list[tuple[Any, Any]] = []
        for rank, pool in enumerate(model.pools[loader]):
            # A loader of lower TP joins the pages of several writers, a loader of higher TP takes a part of a page.
            for head in range(0, per_loader, count := min(per_writer, per_loader)):
                owner, at = divmod(rank * per_loader + head, per_writer)
                for layer in range(model.layers):
                    for part in range(2):
                        buffer = pool[part][layer].view(torch.uint8).numpy().view(item)
                        pages = buffer.reshape(-1, PAGE, per_loader)[:, :, head : head + count]
                        self.pairs.append((pages, store[:, owner, layer, part, :, at : at + count]))

    def write(self, slots: Sequence[int]) -> None:
        """Copy pages to records, for equal TP."""
        for pages, records in self.pairs:
            for at, slot, length in _runs(slots):
                records[at : at + length] = pages[slot : slot + length]

    def load(self, slots: Sequence[int]) -> None:
        """Copy records to pages."""
        for pages, records in self.pairs:
            for at, slot, length in _runs(slots):
                pages[slot : slot + length] = records[at : at + length]


class HeadMajor:
    """The product's copies of all ranks."""

    def __init__(self, model: Model, tp: int) -> None:
        ranks = [{"kv": attention_buffers(*pool, PAGE, range(model.layers))} for pool in model.pools[tp]]
        geometry = KvGeometry("", PAGE, (pool_geometry("kv", ranks[0]["kv"], {"kv": model.heads}),))
        self._offsets = [page * model.page_bytes for page in range(model.pages)]
        self._ranks = [
            RankCopies(geometry, buffers, model.store, tp=tp, rank=rank, layers=model.layers)
            for rank, buffers in enumerate(ranks)
        ]

    def write(self, slots: Sequence[int]) -> None:
        """Copy pages to records."""
        for copies in self._ranks:
            copies.write("kv", slots, self._offsets)

    def load(self, slots: Sequence[int]) -> None:
        """Copy records to pages."""
        for copies in self._ranks:
            copies.load({"kv": (slots, self._offsets)})


def _runs(slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """First record, first slot and length: all in one piece, or each alone."""
    if slots[-1] - slots[0] == len(slots) - 1:
        return [(0, slots[0], len(slots))]
    return [(at, slot, 1) for at, slot in enumerate(slots)]


def works(model: Model) -> Iterator[tuple[str, Callable[[Sequence[int]], object]]]:
    """What is measured, by name; each takes the slots of the pages."""
    target = torch.ones_like(model.store)
    yield "memcpy", lambda _: target.copy_(model.store)
    for tp in TPS:
        yield f"head-major, write at TP {tp}", HeadMajor(model, tp).write
    for tp in TPS:
        yield f"head-major, load at TP {tp} from any", HeadMajor(model, tp).load
    for tp in TPS:
        yield f"as written, write at TP {tp}", AsWritten(model, tp, tp).write
    for writer, loader in PAIRS:
        yield f"as written, load at TP {loader} from TP {writer}", AsWritten(model, writer, loader).load


def rate(model: Model, work: Callable[[], object], repeats: int) -> float:
    """Bytes of all heads, in GB per second of CPU time."""
    times_s = []
    for _ in range(repeats):
        started = time.thread_time()
        work()
        times_s.append(time.thread_time() - started)
    return float(model.page_bytes * model.pages / min(times_s) / 1e9)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=40, help="pages of 16 tokens that are copied (default: 40)")
    parser.add_argument("--layers", type=int, default=64, help="layers of the model (default: 64)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads of the model, a multiple of 4 (default: 8)")
    parser.add_argument("--head-dim", type=int, default=128, help="size of a head (default: 128)")
    parser.add_argument("--repeats", type=int, default=5, help="the best of this many counts (default: 5)")
    parser.add_argument("--json", action="store_true", help="one object on stdout instead of the table")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = Model(arguments)
    found = {
        name: [rate(model, partial(work, model.slots(alone)), arguments.repeats) for alone in (False, True)]
        for name, work in works(model)
    }
    if arguments.json:
        print(json.dumps({"page_bytes": model.page_bytes, "pages": model.pages, "gb_per_s": found}))
        return 0
    print(f"{model.pages} pages of {model.page_bytes / 1e6:.1f} MB, bf16; GB per second of CPU time on one core")
    print(f"{'':36} {'neighbours':>10} {'alone':>10}")
    for name, rates in found.items():
        print(f"{name:36} " + " ".join(f"{value:10.2f}" for value in rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
