"""The analytic performance model against a whole forward pass on this machine's GPU.

    python -m benchmarks.gpu_model_check [--models llama-3.1-8b qwen3-32b:2] [--seconds 300] [--output FILE]

A model is a preset and a tensor-parallel degree (`qwen3-32b:2`; default 1). The pass has the shapes of one rank, random
bf16 weights of every layer, and what a serving engine computes: norms, rotary embedding, attention to the KV in memory,
the MLP, and the logits of the last token. Attention is FlashAttention 2 or cuDNN, whichever is faster at that point.
Decode steps are CUDA graphs. There is no communication, so the model's all-reduces are left out too. `measured` has no
scheduler: the model's fixed time per pass (1 ms) stands for one, and `ratio` is (model less that time) / measured.
Points whose KV does not fit beside the weights are left out.

`shares`: what the parts reach of the GPU's published peaks, to be compared with the shares that the model assumes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ampd.perf.gpus import Gpu
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.roofline import Efficiency, analytic_profile, kv_capacity_tokens
from ampd.types import Parallelism
from benchmarks.gpu_forward_pass import ATTENTIONS, BF16, DEVICE, Part, Rank
from benchmarks.this_gpu import DenseModel, preset

INCREMENTS = (256, 1024, 4096, 8192)
HISTORIES = (0, 8192, 32768)
BATCHES = (1, 8, 32, 64)
CONTEXTS = (2048, 8192, 32768)
REPEATS = 3


def median_s(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Seconds of the GPU's work, by its own events."""
    seconds = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(seconds)


def fastest(q: Any, k: Any, v: Any, history: int) -> tuple[str, float]:
    """The faster attention for these shapes, and its time. They must agree; one that cannot do it is left out."""
    times: dict[str, float] = {}
    found: list[Any] = []
    for name, attention in ATTENTIONS.items():
        try:
            found.append(attention(q, k, v, history))
            times[name] = median_s(as_graph(partial(attention, q, k, v, history)))
        except (RuntimeError, NotImplementedError) as error:
            print(f"  {name}: {str(error).splitlines()[0][:150]}", flush=True)
    if any(not torch.allclose(found[0], other, atol=0.02, rtol=0.02) for other in found[1:]):
        print(f"  attentions differ by {float((found[0] - found[1]).abs().max()):.3g}", flush=True)
    best = min(times, key=times.__getitem__)
    return best, times[best]


def as_graph(run: Callable[[], Any]) -> Callable[[], Any]:
    """A call as a CUDA graph, after one call that warms up."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], Any] = graph.replay
    return replay


def points(dense: DenseModel, tp: int, card: Gpu, deadline_s: float) -> Iterator[dict[str, Any]]:
    """Measured and predicted times."""
    efficiency = replace(Efficiency(), all_reduce_s=0.0, link_share=1e9)
    model = PiecewiseModel(analytic_profile(dense.shape, card, (tp,), datetime.date.today(), efficiency))
    theta = Parallelism(tp)
    room = min(kv_capacity_tokens(dense.shape, card, tp), 64 * 8192 + 64)
    if room < max(INCREMENTS):
        print(f"{dense.shape.name} at TP {tp} does not fit")
        return
    rank = Rank(dense, tp, room, max(HISTORIES) + max(INCREMENTS))

    cases = [("decode", batch, 1, context - 1) for batch in BATCHES for context in CONTEXTS]
    cases += [("prefill", 1, new, history) for new in INCREMENTS for history in HISTORIES]
    for what, batch, new, history in cases:
        context = history + new
        if batch * context > room or context > dense.shape.max_context_tokens or time.perf_counter() > deadline_s:
            continue
        best, attention_s = fastest(*rank.inputs(batch, new, context), history)
        parts = [Part(batch, new, history, ATTENTIONS[best])]
        tokens = torch.randint(0, dense.shape.vocabulary, (batch * new,), device=DEVICE)
        measured_s = median_s(as_graph(lambda: rank.forward(tokens, parts)))  # noqa: B023
        if what == "decode":
            model_s = model.decode_step_s(batch, batch * context, theta)
        else:
            model_s = model.prefill_s(history, new, theta)
        yield {
            "what": what,
            "model": dense.shape.name,
            "tp": tp,
            "batch": batch,
            "new": new,
            "history": history,
            "attention": best,
            "attention_ms": attention_s * dense.layers * 1e3,
            "measured_ms": measured_s * 1e3,
            "model_ms": model_s * 1e3,
            "ratio": (model_s - efficiency.forward_s) / measured_s,
        }
    yield from shares(rank, card)


def shares(rank: Rank, card: Gpu) -> Iterator[dict[str, Any]]:
    """What matrix products and attention reach of the published peaks."""
    dense = rank.dense
    name = {"what": "share", "model": dense.shape.name, "heads": rank.heads}
    matrix_bytes = sum(part.numel() * 2 for layer in rank.layers for part in layer)
    for tokens in (1, 64, 256, 4096):
        inputs = {width: torch.randn(tokens, width, dtype=BF16, device=DEVICE) for width in widths(rank)}

        def products(inputs: dict[int, Any] = inputs) -> None:
            for layer in rank.layers:
                for part in layer:
                    inputs[part.shape[1]] @ part.T

        seconds = median_s(as_graph(products))
        yield name | {
            "part": f"matrix products of {tokens} tokens",
            "flops_share": tokens * matrix_bytes / seconds / card.flops_per_s,
            "memory_share": matrix_bytes / seconds / card.memory_bytes_per_s,
        }
    for batch, new, history in ((1, 4096, 0), (1, 8192, 0), (1, 1024, 32768), (1, 4096, 32768)):
        flops = 4 * rank.heads * dense.head_dim * new * (history + new / 2)
        best, seconds = fastest(*rank.inputs(batch, new, history + new), history)
        yield name | {
            "part": f"{best} of {new} tokens behind {history}",
            "flops_share": flops / seconds / card.flops_per_s,
        }
    for batch, context in ((1, 32768), (8, 8192), (32, 8192), (64, 2048)):
        q, k, v = rank.inputs(batch, 1, context)
        best, seconds = fastest(q, k, v, context - 1)
        yield name | {
            "part": f"{best} of a step of {batch} at {context}",
            "memory_share": 2 * k.numel() * 2 / seconds / card.memory_bytes_per_s,
        }
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    seconds = median_s(as_graph(lambda: target.copy_(source)))
    yield name | {"part": "copy on the GPU", "memory_share": 2 * source.numel() / seconds / card.memory_bytes_per_s}


def widths(rank: Rank) -> set[int]:
    return {part.shape[1] for part in rank.layers[0]}


Rows = Callable[[DenseModel, int, Gpu, float], Iterator[dict[str, Any]]]
"""The rows of a model: from its shape, the degree, the GPU, and the time after which no further point begins."""


def print_rows(rows_of: Rows, description: str | None) -> None:
    """The body of a command that measures models on this GPU: its flags, and each row as it comes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b", "qwen3-32b:2"])
    parser.add_argument("--seconds", type=float, default=300.0, help="after which no further point begins")
    parser.add_argument("--output", type=Path, help="append each row to this file as JSON, as it comes")
    arguments = parser.parse_args()
    deadline_s = time.perf_counter() + arguments.seconds
    card = preset()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, card, flush=True)
    for name in arguments.models:
        model, _, tp = name.partition(":")
        for row in rows_of(DenseModel.of(model), int(tp or 1), card, deadline_s):
            print("  ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
            if arguments.output:
                with arguments.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    print_rows(points, __doc__)
