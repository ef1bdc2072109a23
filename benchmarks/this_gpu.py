"""The GPU of this machine."""

from __future__ import annotations

import re

import torch

from ampd.perf.roofline import GPUS, Gpu


def preset() -> Gpu:
    """The preset of the GPU that this process has."""
    name = torch.cuda.get_device_name()
    words = re.findall(r"[a-z0-9]+", name.lower())
    for word in words:
        if card := GPUS.get(word):
            return card
    raise SystemExit(f"no preset for {name}; known: {', '.join(GPUS)}")
