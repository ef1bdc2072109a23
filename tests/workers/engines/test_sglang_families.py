"""Models of each family of KV pools exchange KV between real engines: equal tokens, and nothing is computed twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.sglang_cells import check_cells, family_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("forked"),
]

SMALL = tuple(product((1, 2), (1, 2)))
WITH_4 = ((1, 4), (2, 4), (4, 1), (4, 2), (4, 4))
ALL = (*SMALL, *WITH_4)
CELLS: list[tuple[str, dict[str, Any], Sequence[tuple[int, int]]]] = [
    ("qwen3", {}, [(1, 2), (2, 1)]),
    ("mixtral", {}, [(1, 2)]),
    # At one TP, as fp8 below. The model is in fp32, because a sum in bf16 depends on how much of a prompt is computed
    # at once, and on the processor.
    ("qwen3", {"arguments": {"kv_cache_dtype": "bf16"}}, [(1, 1)]),
    ("deepseek_v3", {}, [(1, 2), (2, 1)]),
    ("gpt_oss", {}, [(1, 2), (2, 1)]),
    # At one TP: the sums of two TPs differ in their last bits, and rounding to fp8 makes other tokens of that.
    ("gpt_oss", {"arguments": {"kv_cache_dtype": "fp8_e4m3"}}, [(1, 1)]),
    ("gemma_4", {}, [(1, 2)]),
    ("qwen3_next", {}, [(1, 2), (2, 1)]),
]
"""Family, options that differ from its own, and pairs of TP (prefill worker, decode worker)."""

MATRIX: list[tuple[str, dict[str, Any], Sequence[tuple[int, int]]]] = [
    ("qwen3_moe", {}, ALL),
    ("deepseek_v3", {}, ALL),
    ("gpt_oss", {}, ALL),
    ("gemma_4", {}, SMALL),
    ("qwen3_next", {}, SMALL),
    # Half as many key heads as heads of queries: with 8 of these TP 4 is possible.
    ("qwen3_next", {"heads": 8}, WITH_4),
]
"""All pairs of the families: half an hour."""


@pytest.mark.parametrize(
    ("family", "options", "pairs"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.matrix) for cell in MATRIX)]
)
async def test_pairs_of_engines_exchange_all_pools(
    family: str, options: dict[str, Any], pairs: Sequence[tuple[int, int]], tmp_path: Path
) -> None:
    await check_cells(family_model(family, **options), tmp_path, pairs)
