"""Models of each family of KV pools exchange KV between real engines: equal tokens, and nothing is computed twice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.harness.tiny_families import make_family

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.sglang_cells import Model, check_cells

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("forked"),
]

DEGREES = tuple(product((1, 2), (1, 2)))
CELLS: list[tuple[str, dict[str, Any], Sequence[tuple[int, int]]]] = [
    ("qwen3", {}, DEGREES),
    ("qwen3_moe", {}, DEGREES),
    # Some of MLA's attention backends on GPUs run no other pages.
    ("deepseek_v3", {"page_size": 64}, DEGREES),
    ("gpt_oss", {"pools": ("kv", "swa")}, DEGREES),
    # At one TP: the sums of two TPs differ in their last bits, and rounding to fp8 makes other tokens of that.
    ("gpt_oss", {"pools": ("kv", "swa"), "arguments": {"kv_cache_dtype": "fp8_e4m3"}}, [(1, 1)]),
    ("gemma_4", {"pools": ("kv", "swa")}, DEGREES),
    ("qwen3_next", {"pools": ("kv", "mamba")}, DEGREES),
]
"""Family, options that differ from those of a plain model, and pairs of TP (prefill worker, decode worker)."""


@pytest.mark.parametrize(("family", "options", "pairs"), CELLS)
async def test_pairs_of_engines_exchange_all_pools(
    family: str, options: dict[str, Any], pairs: Sequence[tuple[int, int]], tmp_path: Path
) -> None:
    await check_cells(Model(partial(make_family, family=family), family=family, **options), tmp_path, pairs)
