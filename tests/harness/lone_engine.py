"""A SGLang engine of a test's own, without AMPD: in a process group that ends with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.popen_fork import Popen
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cpu_families import ENGINE_ARGUMENTS, cpu_family

_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.2,
    "max_total_tokens": 2048,
    "page_size": 16,
    "max_running_requests": 4,
    "skip_tokenizer_init": True,
    "log_level": "error",
}
_TIMEOUT_S = 300.0


def generate(folder: Path, family: str, prompts: Sequence[list[int]], tokens: int) -> list[dict[str, Any]]:
    """Greedy outputs of an engine for one prompt after the other, as SGLang gives them, with log-probabilities.

    It needs `tests.harness.forked_engines.forked_engines` around it.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(theirs, str(folder), family, list(prompts), tokens))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_TIMEOUT_S):
            raise TimeoutError(f"the engine gave nothing in {_TIMEOUT_S:g} s")
        outputs: list[dict[str, Any]] = ours.recv()
    finally:
        process.join(10.0)
        process.kill()
        process.join()
    return outputs


def serve(outputs: Connection, folder: str, family: str, prompts: Sequence[list[int]], tokens: int) -> None:
    """Run in a forked process that has imported SGLang and nothing that a fork could break."""
    from sglang.srt.entrypoints.engine import Engine

    os.setsid()
    patch = pytest.MonkeyPatch()
    patch.setattr(multiprocessing.Process, "_Popen", Popen)
    patch.setattr(multiprocessing, "set_start_method", lambda *_args, **_options: None)
    try:
        with cpu_family(family):
            engine = Engine(model_path=folder, **_ARGUMENTS, **ENGINE_ARGUMENTS.get(family, {}))
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        call = partial(engine.generate, sampling_params=sampling, return_logprob=True)
        outputs.send([call(input_ids=prompt) for prompt in prompts])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os.killpg(0, signal.SIGKILL)
