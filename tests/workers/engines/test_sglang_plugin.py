"""AMPD's SGLang plugin: a layer computes without vLLM, and engines of others stay as they are."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from workers.engines.sglang_plugin import (
    ENGINE_FLAG,
    register,
    with_torch_rotary,
)

pytestmark = pytest.mark.slow


def test_the_stand_in_is_there_only_while_a_layer_is_made() -> None:
    layer = SimpleNamespace(forward_native=print)

    def make(made: Any) -> None:
        made.kernel = importlib.import_module("vllm._custom_ops").rotary_embedding

    with_torch_rotary(make, layer)
    assert layer.kernel is None
    assert layer._forward_method is layer.forward_native
    assert "vllm._custom_ops" not in sys.modules


def test_other_engines_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENGINE_FLAG, raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    register()
