"""AMPD's SGLang plugin: the rotary embedding is the right one, and engines of others stay as they are."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from workers.engines.sglang_plugin import (
    ENGINE_FLAG,
    register,
    rotary_embedding,
    with_torch_rotary,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary", [8, 6])
def test_rotary_turns_each_pair_by_its_angle(neox: bool, rotary: int) -> None:
    torch: Any = pytest.importorskip("torch")
    torch.manual_seed(0)
    tokens, heads, head_size = 5, 3, 8
    angles = torch.arange(20)[:, None] / 10 ** torch.arange(rotary // 2)
    cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.tensor([0, 3, 3, 7, 19])
    query, key = torch.randn(tokens, heads * head_size), torch.randn(tokens, head_size)
    expected = [states.clone() for states in (query, key)]
    for states in expected:
        view = states.view(tokens, -1, head_size)
        for token in range(tokens):
            for pair in range(rotary // 2):
                at = (pair, pair + rotary // 2) if neox else (2 * pair, 2 * pair + 1)
                number = torch.complex(view[token, :, at[0]], view[token, :, at[1]])
                turned = number * torch.exp(1j * angles[positions[token], pair])
                view[token, :, at[0]], view[token, :, at[1]] = turned.real, turned.imag
    rotary_embedding(positions, query, key, head_size, cache, neox)
    assert torch.allclose(query, expected[0], atol=1e-6)
    assert torch.allclose(key, expected[1], atol=1e-6)


def test_the_stand_in_is_there_only_while_it_is_asked_for() -> None:
    def build() -> Any:
        return importlib.import_module("vllm._custom_ops").rotary_embedding

    assert with_torch_rotary(build) is rotary_embedding
    assert "vllm._custom_ops" not in sys.modules


def test_other_engines_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENGINE_FLAG, raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    register()
