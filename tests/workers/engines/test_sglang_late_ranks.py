"""Whichever rank of an engine is late: the tokens of one engine, and nothing is computed twice."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest

from ampd.tiny_model import TinyModel, make_tiny_model

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.sglang_cells import Cells, Model, alone, connected, started

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("forked"),
]


async def test_each_of_four_ranks_may_be_the_late_one(tmp_path: Path) -> None:
    """A session per late rank. The two engines take turns as prefill worker."""
    sizes = TinyModel(layers=2, hidden_size=128, heads=4, kv_heads=4, max_context_tokens=2048)
    model = Model(partial(make_tiny_model, sizes=sizes))
    folder = model.make(tmp_path / "model")
    async with AsyncExitStack() as stack:
        late = stack.enter_context(model.late_engines(tmp_path))
        engines = [await started(stack, model.settings(folder, tp)) for tp in (2, 4)]
        cells = Cells(model, await alone(engines[0]), late)
        pairs = cycle([connected(*engines), connected(*reversed(engines))])
        for late_rank, pair in zip(range(4), pairs, strict=False):
            pair.connect()
            await cells.check_route(pair, "alternating", late_rank)
            await cells.check_that_pools_matter(pair.prefill, pair.decode)
