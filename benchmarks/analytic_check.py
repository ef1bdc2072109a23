"""The analytic model against AIConfigurator's: the ratio of prefill and decode times, by model and GPU.

    python benchmarks/analytic_check.py [--tp 4]

Needs the extra `aiconfigurator`. A ratio above 1: the analytic model is the slower one.
"""

from __future__ import annotations

import argparse
import sys

from ampd.errors import UserError
from ampd.perf.fit import SYSTEMS, aiconfigurator_model
from ampd.perf.presets import MODELS, analytic_model
from ampd.types import Parallelism

_PREFILLS = (512, 4096)
_BATCHES = (1, 16, 64)
_CONTEXT_TOKENS = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=4)
    theta = Parallelism(parser.parse_args().tp)
    cells = [f"prefill {tokens}" for tokens in _PREFILLS] + [f"decode {batch}" for batch in _BATCHES]
    print("| model | GPU | " + " | ".join(cells) + " |\n" + "| --- " * (len(cells) + 2) + "|")
    for model in MODELS:
        for card in sorted(SYSTEMS):
            try:
                ours = analytic_model(model, card, (theta.tp,))
                theirs = aiconfigurator_model(model, card, (theta.tp,))
            except UserError as error:
                print(error, file=sys.stderr)
                continue
            ratios = [ours.prefill_s(0, n, theta) / theirs.prefill_s(0, n, theta) for n in _PREFILLS]
            ratios += [
                ours.decode_step_s(n, n * _CONTEXT_TOKENS, theta) / theirs.decode_step_s(n, n * _CONTEXT_TOKENS, theta)
                for n in _BATCHES
            ]
            print(f"| {model} | {card} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
