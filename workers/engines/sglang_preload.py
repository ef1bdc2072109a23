"""What a worker with SGLang imports on a machine without a GPU, for the server that forks such workers.

Importing it fails where there is a GPU. NIXL and Dynamo are left out: they set themselves up when they are loaded, each
in its own process.
"""

from __future__ import annotations

import importlib

import torch

IMPORTS = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "workers.kv.ranks.linker",
)
"""What SGLang's processes import. The registry imports all models, as a scheduler does."""

if torch.cuda.is_available():
    raise RuntimeError("there is a GPU, and CUDA does not survive a fork")
for module in (*IMPORTS, "workers.engines.sglang", "workers.parts"):
    importlib.import_module(module)
