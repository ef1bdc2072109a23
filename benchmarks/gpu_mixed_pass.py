"""One pass that prefills and decodes, against the two passes it replaces, on this machine's GPU.

    python -m benchmarks.gpu_mixed_pass [--models llama-3.1-8b qwen3-32b:2] [--seconds 300] [--output FILE]

The passes are those of `benchmarks.gpu_model_check`: one rank, random weights, no communication, no scheduler. A mixed
pass multiplies the weights with the new tokens of a prefill and those of a decode batch together; only the attention is
apart. Times are in ms. `graph` is a CUDA graph. `eager` starts each kernel from Python, as engines do in passes whose
sizes they did not capture.

`saved`: share of the time of the two passes that the mixed one saves. `saved_eager`: the same, with an eager mixed
pass, an eager prefill and a decode step as a graph, which is what SGLang does. `ratio`: the model's time of a mixed
pass, less its fixed time per pass, over `mixed`. `ratio_apart`: the same of the two passes. `equal_tokens`: share of
the sequences that get the same token in the mixed pass.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from ampd.perf.gpus import Gpu
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.roofline import Efficiency, analytic_profile, kv_capacity_tokens
from ampd.types import Parallelism
from benchmarks.gpu_forward_pass import ATTENTIONS, DEVICE, Part, Rank
from benchmarks.gpu_model_check import as_graph, fastest, median_s, print_rows
from benchmarks.this_gpu import DenseModel

INCREMENTS = (128, 256, 512, 1024, 2048)
HISTORIES = (0, 8192)
BATCHES = ((8, 2048), (32, 2048), (32, 8192), (64, 4096))
"""Sequences, and tokens of context of each."""
EAGER_REPEATS = 11
"""Their times vary with the machine's processor."""


def rows(dense: DenseModel, tp: int, card: Gpu, deadline_s: float) -> Iterator[dict[str, Any]]:
    """Every pair of a prefill and a batch that fits beside the weights, until the deadline."""
    theta = Parallelism(tp)
    efficiency = replace(Efficiency(), all_reduce_s=0.0, link_share=1e9)
    model = PiecewiseModel(analytic_profile(dense.shape, card, (tp,), datetime.date.today(), efficiency))
    room = min(kv_capacity_tokens(dense.shape, card, tp), 300_000)
    rank = Rank(dense, tp, room, max(HISTORIES) + max(INCREMENTS))
    for (batch, context), history, new in product(BATCHES, HISTORIES, INCREMENTS):
        if batch * context + history + new > room or time.perf_counter() > deadline_s:
            continue
        prefill = part(rank, 1, new, history)
        step = replace(part(rank, batch, 1, context - 1), first_kv_token=prefill.kv_tokens)
        predicted_s = model.mixed_pass_s([(history, new)], batch, batch * context, theta)
        two_s = model.prefill_s(history, new, theta) + model.decode_step_s(batch, batch * context, theta)
        measured = times_s(rank, prefill, step)
        apart_s = measured["prefill"] + measured["step"]
        yield {
            "model": dense.shape.name,
            "tp": tp,
            "new": new,
            "history": history,
            "batch": batch,
            "context": context,
            **{f"{key}_ms": 1e3 * seconds for key, seconds in measured.items()},
            "saved": 1 - measured["mixed"] / apart_s,
            "saved_eager": 1 - measured["mixed_eager"] / (measured["prefill_eager"] + measured["step"]),
            "ratio": (predicted_s - efficiency.forward_s) / measured["mixed"],
            "ratio_apart": (two_s - 2 * efficiency.forward_s) / apart_s,
            "equal_tokens": equal_share(rank, prefill, step),
        }


def times_s(rank: Rank, prefill: Part, step: Part) -> dict[str, float]:
    """Seconds of each pass as a graph, and of those with a prefill also without one."""
    found: dict[str, float] = {}
    for name, parts in (("prefill", [prefill]), ("step", [step]), ("mixed", [prefill, step])):
        run = partial(rank.forward, random_tokens(rank, parts), parts)
        found[name] = median_s(as_graph(run))
        if prefill in parts:
            found[f"{name}_eager"] = median_s(run, EAGER_REPEATS)
    return found


def random_tokens(rank: Rank, parts: Sequence[Part]) -> Any:
    return torch.randint(0, rank.dense.shape.vocabulary, (sum(part.tokens for part in parts),), device=DEVICE)


def equal_share(rank: Rank, prefill: Part, step: Part) -> float:
    """Of the sequences, those whose next token is the same in a mixed pass."""
    tokens = random_tokens(rank, [prefill, step])
    rows = zip(tokens.split([prefill.tokens, step.tokens]), (prefill, step), strict=True)
    apart = torch.cat([rank.forward(mine, [each]) for mine, each in rows])
    return float((apart == rank.forward(tokens, [prefill, step])).float().mean())


def part(rank: Rank, sequences: int, new: int, history: int) -> Part:
    """With the attention that is fastest for it."""
    best, _ = fastest(*rank.inputs(sequences, new, history + new), history)
    return Part(sequences, new, history, ATTENTIONS[best])


if __name__ == "__main__":
    print_rows(rows, __doc__)
