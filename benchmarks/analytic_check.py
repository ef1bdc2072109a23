"""The analytic model against AIConfigurator's measured operators, by model and GPU.

    python -m benchmarks.analytic_check --write benchmarks/results/analytic-check.csv
    python -m benchmarks.analytic_check --kept

The first needs the extra `aiconfigurator` and writes a row for each point. The second prints their table. A
ratio above 1: the analytic model is the slower one.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import exp, log
from pathlib import Path
from statistics import mean

from ampd.errors import UserError
from ampd.perf.fit import measured_engine
from ampd.perf.presets import MODELS, analytic_model, model_shape
from ampd.types import Parallelism
from benchmarks.commit import commit
from benchmarks.result_files import read

RESULTS = Path(__file__).parent / "results" / "analytic-check.csv"
GPUS = ("h100", "h200", "b200", "l40s")
SAME_LAYERS = ("llama-3.3-70b", "qwen3-coder-30b-a3b")
"""Presets that have the layers of another one."""
_PREFILLS = ((0, 512), (0, 4096), (0, 16_384), (32_768, 1024))
_STEPS = ((1, 2000), (16, 2000), (64, 2000), (16, 32_000))
_COLUMNS = ("model", "gpu", "tp", "what", "ours_ms", "theirs_ms", "ratio")


def rows(models: Sequence[str], gpus: Sequence[str]) -> Iterator[dict[str, str]]:
    """Every point, at the smallest degree that fits; for a model without data none."""
    for model in models:
        for card in gpus:
            try:
                yield from _rows(model, card)
            except UserError as error:
                print(error, file=sys.stderr)


def _rows(model: str, card: str) -> Iterator[dict[str, str]]:
    ours = analytic_model(model, card)
    theta = ours.parallelisms[0]
    with measured_engine(model, model_shape(model), card, theta.tp) as theirs:
        points = [
            (f"prefill {incr} behind {hist}", ours.prefill_s(hist, incr, theta), theirs.prefill_s(hist, incr))
            for hist, incr in _PREFILLS
        ]
        points += [
            (
                f"step {batch} x {context}",
                ours.decode_step_s(batch, batch * context, theta),
                theirs.decode_step_s(batch, context),
            )
            for batch, context in _STEPS
            if batch * context <= (ours.kv_capacity_tokens(Parallelism(theta.tp)) or 0)
        ]
    for what, our_s, their_s in points:
        values = (model, card, theta.tp, what, f"{our_s * 1e3:.2f}", f"{their_s * 1e3:.2f}", f"{our_s / their_s:.2f}")
        yield dict(zip(_COLUMNS, map(str, values), strict=True))


def table(results: Sequence[dict[str, str]]) -> str:
    """A line for each model, the worst first: its ratios on the GPU where they are worst, and the error on all."""
    groups: dict[str, dict[tuple[str, str], list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for row in results:
        groups[row["model"]][row["gpu"], row["tp"]].append(row)
    lines = []
    for model, cards in groups.items():
        (card, tp), rows = max(cards.items(), key=lambda group: _distance(group[1]))
        error = exp(mean(abs(log(float(row["ratio"]))) for each in cards.values() for row in each))
        spans = " | ".join(_span(rows, kind) for kind in ("prefill", "step"))
        lines.append((-_distance(rows), f"| {model} | {card} | {tp} | {spans} | {error:.2f} |"))
    head = ["| model | worst GPU | TP | prefills there | steps there | mean error, all GPUs |", "| --- " * 6 + "|"]
    return "\n".join([*head, *(line for _, line in sorted(lines))]) + "\n"


def _distance(rows: Sequence[dict[str, str]]) -> float:
    return max(abs(log(float(row["ratio"]))) for row in rows)


def _span(rows: Sequence[dict[str, str]], kind: str) -> str:
    ratios = [float(row["ratio"]) for row in rows if row["what"].startswith(kind)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=sorted(MODELS.keys() - set(SAME_LAYERS)))
    parser.add_argument("--gpus", nargs="+", default=list(GPUS))
    parser.add_argument("--write", type=Path, help="measure, and write the rows")
    parser.add_argument("--kept", action="store_true", help="print the table of the kept rows, without the package")
    arguments = parser.parse_args()
    if arguments.kept:
        print(table(read(RESULTS)))
        return
    found = list(rows(arguments.models, arguments.gpus))
    if arguments.write:
        with arguments.write.open("w", newline="", encoding="utf-8") as file:
            file.write(f"# commit {commit()}, {datetime.now(UTC):%Y-%m-%d}\n")
            file.write("# python -m benchmarks.analytic_check --write benchmarks/results/analytic-check.csv\n")
            writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
    print(table(found))


if __name__ == "__main__":
    main()
